"""``environment``: the container that a trial runs in."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag

from determined_ds.experiment.schema.section import Flag, Integer, Number, Section, Text, by_kind, fault

OWN_CONTAINER = "determined-container"


class ImageMap(Section):
    """An image for each kind of slot; ``gpu`` is the old name of ``cuda``."""

    cpu: Text | None = None
    cuda: Text | None = None
    rocm: Text | None = None
    gpu: Text | None = None


def _no_mapping(value: Any) -> Any:
    if isinstance(value, dict):
        name, given = next(iter(value.items()), ("NAME", "VALUE"))
        raise fault("wrong-type", "must be NAME=VALUE, not a mapping", f"write {name}={given}")
    return value


Variable = Annotated[Text, BeforeValidator(_no_mapping)]


class VariablesMap(Section):
    """Variables for each kind of slot; ``gpu`` is the old name of ``cuda``."""

    cpu: list[Variable] | None = None
    cuda: list[Variable] | None = None
    rocm: list[Variable] | None = None
    gpu: list[Variable] | None = None


Image = Annotated[
    Annotated[Text, Tag("text")] | Annotated[ImageMap, Tag("mapping")],
    by_kind(
        "text",
        "mapping",
        expected="a string or a mapping of cpu, cuda or rocm",
        fix="write e.g. image: determinedai/pytorch-ngc:0.38.1",
    ),
]
Variables = Annotated[
    Annotated[list[Variable], Tag("list")] | Annotated[VariablesMap, Tag("mapping")],
    by_kind(
        "list",
        "mapping",
        expected="a list of NAME=VALUE, or a mapping of cpu, cuda or rocm to such lists",
        fix="write e.g. environment_variables: [OMP_NUM_THREADS=1]",
    ),
]


class ProxyPort(Section):
    proxy_port: Annotated[Number, Field(description="it is the port to expose", examples=[8080])]
    proxy_tcp: Flag | None = None
    unauthenticated: Flag | None = None
    default_service_id: Flag | None = None


class RegistryAuth(Section):
    username: Text | None = None
    password: Text | None = None
    auth: Text | None = None
    email: Text | None = None
    serveraddress: Text | None = None
    identitytoken: Text | None = None
    registrytoken: Text | None = None


def _not_of_pod(_: Any) -> Any:
    raise fault("out-of-range", "is Determined's to set in a pod", "remove it")


def _not_of_container(_: Any) -> Any:
    fix = "remove it, or, if another container is intended, give that another name"
    raise fault("out-of-range", "is Determined's to set in its own container", fix)


def _image(_: Any) -> Any:
    fix = "set environment.image, or, if another container is intended, give that another name"
    raise fault("out-of-range", "is Determined's to set in its own container", fix)


OfPod = Annotated[Any, BeforeValidator(_not_of_pod)]
OfContainer = Annotated[Any, BeforeValidator(_not_of_container)]


class OwnContainer(Section, extra="allow"):
    """Determined's own; what Kubernetes makes of the other keys is not known here."""

    image: Annotated[Any, BeforeValidator(_image)] = None
    command: OfContainer = None
    args: OfContainer = None
    working_dir: OfContainer = None
    ports: OfContainer = None
    liveness_probe: OfContainer = None
    readiness_probe: OfContainer = None
    startup_probe: OfContainer = None
    lifecycle: OfContainer = None
    termination_message_path: OfContainer = None
    termination_message_policy: OfContainer = None
    image_pull_policy: OfContainer = None
    security_context: OfContainer = None


def _container(value: Any) -> str:
    """A container without a name counts as Determined's own: so the schema's ``if`` is read."""
    name = value.get("name", OWN_CONTAINER) if isinstance(value, dict) else OWN_CONTAINER
    return "own" if name == OWN_CONTAINER else "other"


Container = Annotated[
    Annotated[OwnContainer, Tag("own")] | Annotated[Any, Tag("other")], Discriminator(_container)
]


class PodInnerSpec(Section, extra="allow"):
    containers: list[Container] | None = None


class PodSpec(Section, extra="allow"):
    name: OfPod = None
    name_space: OfPod = None
    spec: PodInnerSpec | None = None


class Environment(Section):
    image: Image | None = None
    environment_variables: Variables | None = None
    proxy_ports: list[ProxyPort] | None = None
    ports: dict[str, Integer] | None = None
    force_pull_image: Flag | None = None
    registry_auth: RegistryAuth | None = None
    add_capabilities: list[Text] | None = None
    drop_capabilities: list[Text] | None = None
    pod_spec: PodSpec | None = None
