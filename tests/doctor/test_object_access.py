"""``checkpoint_storage`` is written to, read from and left as it was, or the finding says at which step it failed."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from determined_ds.doctor.diagnosis import Diagnosis
from determined_ds.doctor.object_access import check_storage
from determined_ds.doctor.surroundings import Host

# Of Determined's client: its own dependencies warn.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def look(config: dict[str, Any], **options: Any) -> Diagnosis:
    finding = check_storage(Host(), config, **options)
    assert finding is not None
    return finding


def test_a_storage_that_works_is_left_as_it_was(s3: dict[str, Any], tmp_path: Path) -> None:
    import boto3

    finding = look({**s3, "prefix": "doctor", "save_trial_best": 1})
    assert finding.state == "ok", finding
    assert "testing" not in finding.found  # its keys
    access = {"aws_access_key_id": s3["access_key"], "aws_secret_access_key": s3["secret_key"]}
    client = boto3.client("s3", endpoint_url=s3["endpoint_url"], region_name="us-east-1", **access)
    assert "Contents" not in client.list_objects_v2(Bucket=s3["bucket"], Prefix="doctor")
    assert look({"type": "shared_fs", "host_path": str(tmp_path)}).state == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_that_is_not_there_is_said(s3: dict[str, Any]) -> None:
    finding = look({**s3, "bucket": "another"})
    assert finding.state == "missing"
    assert "writing: " in finding.found
    assert "bucket" in finding.fix


def test_an_endpoint_that_nobody_listens_at_is_said() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        finding = look(
            {"type": "s3", "bucket": "b", "endpoint_url": url, "access_key": "a", "secret_key": "hush"}
        )
    assert finding.state == "missing"
    assert url in finding.found
    assert "hush" not in str(finding)


def test_an_endpoint_that_never_answers_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        finding = look({"type": "s3", "bucket": "b", "endpoint_url": url}, timeout_s=3)
    assert (finding.state, finding.found.endswith("no answer within 3 s")) == ("missing", True)


def test_a_folder_of_the_agents_cannot_be_looked_at_here(tmp_path: Path) -> None:
    for config in (
        {"type": "shared_fs", "host_path": str(tmp_path / "agents")},
        {"type": "directory", "container_path": str(tmp_path / "agents")},
    ):
        assert look(config).state == "unknown"
    assert check_storage(Host(), None) is None
    assert check_storage(Host(), {"save_trial_best": 2}) is None
