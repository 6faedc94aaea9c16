"""The files of scripts/ray: Ray's launcher takes cluster.yaml, and kuberay.yaml is three whole machines."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped] # no types are installed for it

from symphony.cli import build_parser

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("east", "west", "north")


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((ROOT / "scripts" / "ray" / name).read_text(encoding="utf-8")))


def parsed(*words: str) -> Any:
    """The command line `symphony WORDS`, as the grammar reads it."""
    return build_parser().parse_args(words)


def test_rays_launcher_takes_the_cluster_file_and_it_starts_the_unit() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util", reason="NOT CHECKED BY RAY: symphony-os[fleet]")
    (cluster,) = documents("cluster.yaml")
    util.validate_config(util.prepare_config(cluster))
    for command in cluster["setup_commands"]:
        program, *words = shlex.split(command)
        assert program == "symphony"
        parsed(*words)
    (start,) = cluster["head_start_ray_commands"]
    assert (ROOT / "scripts" / "systemd" / "user" / f"{start.split()[-1]}.service").is_file()


def machines() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pods of kuberay.yaml with their container, the head first."""
    spec = documents("kuberay.yaml")[-1]["spec"]
    templates = [each["template"]["spec"] for each in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    return [(each, *each["containers"]) for each in templates]


def test_each_machine_of_the_manifest_has_keys_a_disk_and_a_name_of_its_own() -> None:
    *others, cluster = documents("kuberay.yaml")
    made = {(each["kind"], each["metadata"]["name"]) for each in others}
    groups = cluster["spec"]["workerGroupSpecs"]
    assert [each["groupName"] for each in groups] == [*NAMES[1:]]
    assert all(each["replicas"] == each["minReplicas"] == each["maxReplicas"] == 1 for each in groups)
    for name, (pod, container) in zip(NAMES, machines(), strict=True):
        env = {each["name"]: each.get("value") for each in container["env"]}
        assert env == {"MACHINE": name, "POD_IP": None}
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert {each["name"] for each in container["volumeMounts"]} == volumes.keys()
        assert volumes["peers"]["secret"]["secretName"] == f"fleet-keys-{name}"
        claim = volumes["state"]["persistentVolumeClaim"]["claimName"]
        assert claim == f"fleet-{name}"
        assert {("PersistentVolumeClaim", claim), ("ConfigMap", volumes["script"]["configMap"]["name"])} <= made
        secrets = [each["secret"] for each in volumes.values() if "secret" in each]
        assert all(each["defaultMode"] == 0o400 for each in secrets), "keys that others may read are refused"


def test_the_commands_of_the_manifest_are_those_of_this_release(tmp_path: Path) -> None:
    config, *_ = documents("kuberay.yaml")
    script = tmp_path / "machine.sh"
    script.write_text(config["data"]["machine.sh"])
    subprocess.run(["bash", "-n", script], check=True)
    serve = script.read_text().replace("\\\n", " ").splitlines()[1].removesuffix("&")
    given = {"$MACHINE": "east", "$POD_IP": "10.0.0.1", "$(POD_IP)": "10.0.0.1", "$(FQ_RAY_IP)": "head"}
    filled = re.sub(r"\$\w+", lambda name: given[name[0]], serve)
    assert parsed(*shlex.split(filled)[1:]).peer_listen == "10.0.0.1:7313"
    for (_, container), head in zip(machines(), (None, "head:6379", "head:6379"), strict=True):
        words = [re.sub(r"\$\(\w+\)", lambda name: given[name[0]], each) for each in container["args"]]
        assert parsed("fleet", *words).head == head
        assert container["command"] == ["bash", "/etc/symphony/fleet/machine.sh"]
        for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
            program, *rest = container[probe]["exec"]["command"]
            assert program == "symphony"
            parsed(*rest)
