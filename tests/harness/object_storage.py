"""Object storage on this machine: an S3 server on loopback, which Determined's own storage manager reaches by boto3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BUCKET = "checkpoints"


def _client(storage: dict[str, Any]) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=storage["endpoint_url"],
        aws_access_key_id=storage["access_key"],
        aws_secret_access_key=storage["secret_key"],
        region_name="us-east-1",
    )


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Start an S3 server with one bucket. Yields ``checkpoint_storage`` for it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    access = {"endpoint_url": f"http://{host}:{port}", "access_key": "testing", "secret_key": "testing"}
    _client(access).create_bucket(Bucket=BUCKET)
    try:
        yield {"type": "s3", "bucket": BUCKET, **access}
    finally:
        server.stop()


def names_in(storage: dict[str, Any]) -> list[str]:
    """The names of the objects below the prefix of a ``checkpoint_storage``."""
    listed = _client(storage).list_objects_v2(Bucket=BUCKET, Prefix=storage["prefix"])
    return [each["Key"] for each in listed.get("Contents", ())]


def manager_of(config: dict[str, Any], temp_dir: Path) -> Any:
    """Determined's storage manager of a ``checkpoint_storage``."""
    from determined.common import storage

    return storage.build({**config, "temp_dir": str(temp_dir)}, container_path=None)
