"""Object storage on this machine: an S3 server on loopback, and folders in place of GCS and Azure.

Determined's own storage managers run on all three. S3 is reached by boto3, through a socket; of the other two, the
client library is replaced by a few calls that keep each object as a file.
"""

from __future__ import annotations

import contextlib
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

BUCKET = "checkpoints"


@contextlib.contextmanager
def s3_server(address: str = "127.0.0.1") -> Iterator[dict[str, Any]]:
    """Start an S3 server with one bucket, at an address of this machine. Yields ``checkpoint_storage`` for it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    access = {"endpoint_url": f"http://{host}:{port}", "access_key": "testing", "secret_key": "testing"}
    s3 = boto3.client(
        "s3",
        endpoint_url=access["endpoint_url"],
        aws_access_key_id=access["access_key"],
        aws_secret_access_key=access["secret_key"],
        region_name="us-east-1",
    )
    s3.create_bucket(Bucket=BUCKET)
    try:
        yield {"type": "s3", "bucket": BUCKET, **access}
    finally:
        server.stop()


def manager_of(config: dict[str, Any], temp_dir: Path) -> Any:
    """Determined's storage manager of a ``checkpoint_storage``."""
    from determined.common import storage

    return storage.build({**config, "temp_dir": str(temp_dir)}, container_path=None)


@contextlib.contextmanager
def clients_of(config: dict[str, Any], folder: Path) -> Iterator[None]:
    """Have the client of GCS or Azure, where a ``checkpoint_storage`` takes one, keep its objects in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if config["type"] == "gcs":
        import google.cloud.storage

        replaced = mock.patch.object(google.cloud.storage, "Client", return_value=FolderGCS(folder))
    elif config["type"] == "azure":
        from azure.storage.blob import BlobServiceClient as Service

        replaced = mock.patch.object(Service, "from_connection_string", return_value=FolderAzure(folder))
    else:
        replaced = contextlib.nullcontext()
    with replaced:
        yield


class _Object:
    """An object; ``name`` is its key below ``root``, which is a bucket or a container."""

    def __init__(self, folder: Path, root: str, name: str) -> None:
        self.name = name
        self._file = folder / urllib.parse.quote(f"{root}/{name}", safe="")

    @property
    def size(self) -> int:
        return self._file.stat().st_size

    def upload_from_string(self, content: bytes) -> None:
        self._file.write_bytes(content)

    def upload_from_filename(self, path: str) -> None:
        self._file.write_bytes(Path(path).read_bytes())

    def download_to_filename(self, path: str) -> None:
        Path(path).write_bytes(self._file.read_bytes())

    def delete(self) -> None:
        self._file.unlink()

    def upload_blob(self, file: IO[bytes], overwrite: bool) -> None:
        assert overwrite
        self._file.write_bytes(file.read())

    def download_blob(self) -> Any:
        return SimpleNamespace(readinto=lambda file: file.write(self._file.read_bytes()))

    delete_blob = delete


def _objects(folder: Path, root: str, prefix: str) -> list[_Object]:
    keys = sorted(urllib.parse.unquote(file.name) for file in folder.iterdir())
    names = [key.removeprefix(f"{root}/") for key in keys if key.startswith(f"{root}/{prefix}")]
    return [_Object(folder, root, name) for name in names]


class FolderGCS:
    """What ``GCSStorageManager`` uses of ``google.cloud.storage.Client``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def bucket(self, bucket: str) -> Any:
        return SimpleNamespace(
            blob=lambda name: _Object(self._folder, bucket, name),
            list_blobs=lambda prefix: _objects(self._folder, bucket, prefix),
        )


class FolderAzure:
    """What ``AzureStorageClient`` uses of ``azure.storage.blob.BlobServiceClient``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create_container(self, name: str) -> None:
        """It is there as soon as something is in it."""

    def get_blob_client(self, container: str, name: str) -> _Object:
        return _Object(self._folder, container, name)

    def get_container_client(self, container: str) -> Any:
        return SimpleNamespace(
            list_blobs=lambda name_starts_with: [
                {"name": found.name, "size": found.size}
                for found in _objects(self._folder, container, name_starts_with)
            ]
        )
