"""What the page about stopping shows of clusters: its Job of Kubernetes, and its thread that reads a cloud's notice."""

from __future__ import annotations

import io
import urllib.request
from pathlib import Path

import pytest

import dpfuse
from dpfuse.job.paddle_launch_flags import parse
from tests.docs.pages import ROOT, blocks_of

PAGE = ROOT / "docs/train/stop_together.md"


def block_with(text: str) -> str:
    (found,) = (block.text for block in blocks_of(PAGE) if text in block.text)
    return found


def test_the_job_of_kubernetes_starts_again_by_the_exit_code_that_its_launcher_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = pytest.importorskip("yaml").safe_load(block_with("kind: Job"))
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = [*container["command"], *container["args"]]
    assert command[:3] == ["python", "-m", "dpfuse.launch"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (variable,) = container["env"]
    monkeypatch.setenv(variable["name"], variable["value"])
    Path("train.py").touch()
    args = parse(command[3:])
    stopped, disrupted = job["spec"]["podFailurePolicy"]["rules"]
    assert (stopped["action"], stopped["onExitCodes"]["containerName"]) == ("Ignore", container["name"])
    assert (stopped["onExitCodes"]["operator"], stopped["onExitCodes"]["values"]) == ("In", [args.requeue_exit])
    assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    assert pod["restartPolicy"] == "Never"
    assert args.seconds_to_end == 110 < pod["terminationGracePeriodSeconds"]
    assert int(args.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]
    assert args.training_script_args == ["--checkpoints", mount["mountPath"]]


def test_the_thread_that_reads_a_notice_asks_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [OSError("no route"), b"FALSE", b"TRUE"]

    def answer(request: urllib.request.Request, timeout: float) -> io.BytesIO:
        assert request.get_header("Metadata-flavor") == "Google"
        said = answers.pop(0)
        if isinstance(said, OSError):
            raise said
        return io.BytesIO(said)

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    names: dict[str, object] = {}
    exec(block_with('request_stop("the cloud'), names)
    try:
        names["watch"](names["is_preempted"], seconds=0)
        assert answers == []
        assert dpfuse.agree_to_stop()
    finally:
        dpfuse.forget_stop()


def test_the_demo_is_the_recorded_one() -> None:
    command, shown = block_with("$ make demo-preempted").split("\n", 1)
    assert command == "$ make demo-preempted"
    (record,) = (ROOT / "bench/results").glob("demo-preempted-*.txt")
    assert record.name in PAGE.read_text(encoding="utf-8")
    assert shown.strip() in record.read_text(encoding="utf-8")
