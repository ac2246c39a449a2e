"""The programs of examples/adoption, each as its docstring says; they compare themselves with torch's DDP."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpfuse
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "adoption"
JOB = re.compile("RANK|WORLD_SIZE|LOCAL_|MASTER_|PADDLE_|FLAGS_|DPFUSE_|TORCHELASTIC_|PET_|PYTHONWARNINGS")
SECONDS = 240

# What each needs beside dpfuse's demo, and how many checks it prints.
EXAMPLES = {
    "with_accelerate.py": ("accelerate", 4),
    "with_sharded_accelerate.py": ("accelerate", 4),
    "with_sharded_lightning.py": ("lightning", 5),
    "with_trainer.py": ("transformers", 3),
    "with_lightning.py": ("lightning", 4),
    "with_fabric.py": ("lightning", 2),
    "with_ray.py": ("ray", 1),
    "with_pipeline.py": (None, 1),
    "with_checkpoint.py": (None, 4),
    "with_device_mesh.py": (None, 2),
}


def needs(package: str | None) -> None:
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make test-all` does it")


def run(*command: str) -> str:
    """What the command prints, which must end well."""
    with tempfile.TemporaryDirectory(prefix="home-") as home:  # short: Ray puts sockets there
        environ = {key: value for key, value in os.environ.items() if not JOB.match(key)}
        environ |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "HOME": home, "RAY_TMPDIR": home}
        environ |= {"PYTHONIOENCODING": "utf-8", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environ,
            capture_output=True,
            encoding="utf-8",
            timeout=patience(SECONDS),
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_equals_torchs_ddp(name):
    package, checks = EXAMPLES[name]
    needs(package)
    shown = re.search(r"^    python (.+)$", (FOLDER / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert shown is not None
    printed = run(sys.executable, *shown.group(1).split())
    assert len(re.findall("^passed  ", printed, re.MULTILINE)) == checks
    assert "FAILED" not in printed


@pytest.mark.slow
def test_a_mesh_of_two_ranks_is_compared_bit_by_bit():
    command = "-m dpfuse.launch --nproc_per_node 2 examples/adoption/with_device_mesh.py"
    assert "a 1-D mesh of 2: losses and weights equal DDP's bitwise" in run(sys.executable, *command.split())


def test_every_example_is_run_here():
    assert {path.name for path in FOLDER.glob("with_*.py")} == EXAMPLES.keys()


STRATEGIES = """
import torch, torch.distributed as dist
import dpfuse, dpfuse.integrations.{file} as ours
from {trainer} import LightningModule, Trainer
from {trainer}.strategies import StrategyRegistry
from {fabric} import Fabric
from {fabric}.strategies import STRATEGY_REGISTRY

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
strategy = StrategyRegistry.get("dpfuse")
assert type(strategy) is ours.DPFuseStrategy
assert isinstance(Trainer(strategy="dpfuse", accelerator="cpu", devices=1, logger=False).strategy, ours.DPFuseStrategy)
strategy = ours.DPFuseStrategy(parallel_devices=[torch.device("cpu")], bucket_cap_mb=3)
strategy._lightning_module = strategy.model = Module()
strategy.configure_ddp()
assert type(strategy.model) is dpfuse.DistributedDataParallel
assert strategy.model.bucket_bytes_cap == 3 << 20

fabric = STRATEGY_REGISTRY.get("dpfuse")
assert type(fabric) is ours.DPFuseFabricStrategy
assert isinstance(Fabric(strategy="dpfuse", accelerator="cpu", devices=1).strategy, ours.DPFuseFabricStrategy)
fabric = ours.DPFuseFabricStrategy(parallel_devices=[torch.device("cpu")], find_unused_parameters=True)
wrapped = fabric.setup_module(torch.nn.Linear(2, 2))
assert type(wrapped) is dpfuse.DistributedDataParallel
assert wrapped.find_unused_parameters
assert type(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))) is not type(wrapped)
from {trainer}.callbacks import Callback
from types import SimpleNamespace
assert issubclass(ours.DPFuseMetrics, Callback)
strategy = ours.DPFuseStrategy(parallel_devices=[torch.device("cpu")], metrics=True)
strategy._lightning_module = strategy.model = Module()
strategy.configure_ddp()
logged = []
logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.append((step, sorted(metrics))))
trainer = SimpleNamespace(strategy=strategy, log_every_n_steps=2, global_step=1, loggers=[logger, logger])
callback = ours.DPFuseMetrics()
callback.on_train_start(trainer, None)
callback.on_train_batch_end(trainer, None, None, None, 0)
trainer.global_step = 2
callback.on_train_batch_end(trainer, None, None, None, 1)
assert logged == []  # nothing was measured
strategy.model(torch.ones(1, 2)).sum().backward()
trainer.global_step = 4
for batch in range(2):  # of one step
    callback.on_train_batch_end(trainer, None, None, None, batch)
assert len(logged) == 2
assert logged[0][0] == 4
assert "dpfuse/grad_norm" in logged[0][1]
trainer.strategy = SimpleNamespace(model=Module())
try:
    callback.on_train_start(trainer, None)
except dpfuse.DPFuseError as error:
    assert "DPFuseStrategy(metrics=True)" in str(error)
else:
    raise AssertionError
print("fine")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "trainer", "fabric"),
    [
        ("lightning", "lightning.pytorch", "lightning.fabric"),
        ("pytorch_lightning", "pytorch_lightning", "lightning_fabric"),
    ],
)
def test_both_packages_of_lightning_know_the_strategy(file, trainer, fabric):
    needs(file)
    assert run(sys.executable, "-c", STRATEGIES.format(file=file, trainer=trainer, fabric=fabric)).endswith("fine\n")


TRACKER = """
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
import dpfuse

class Rows(GeneralTracker):
    name, requires_logging_directory, tracker = "rows", False, None

    def __init__(self):
        super().__init__()
        self.rows = []

    def store_init_configuration(self, values):
        pass

    @on_main_process
    def log(self, values, step=None, **options):
        self.rows.append((step, values))

rows = Rows()
with dpfuse.patch(metrics=2):
    accelerator = Accelerator(cpu=True, log_with=rows)
    accelerator.init_trackers("dpfuse")
    net = torch.nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters()))
for step in range(1, 4):
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log(model.metrics(), step=step)
if accelerator.is_main_process:
    assert [(step, values["step"]) for step, values in rows.rows] == [(1, 1), (2, 1), (3, 3)]
    assert all(abs(values["grad_norm"] - 10**0.5) < 1e-5 for _, values in rows.rows)
    print("fine")
else:
    assert rows.rows == []
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_tracker_of_accelerate_gets_the_metrics(tmp_path):
    needs("accelerate")
    (tmp_path / "tracked.py").write_text(TRACKER)
    command = (sys.executable, "-m", "dpfuse.launch", "--nproc_per_node", "2", str(tmp_path / "tracked.py"))
    assert run(*command).endswith("fine\n")


@pytest.fixture
def checklist(monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup) -> type:
    """The examples' reporter, in a job of one rank."""
    monkeypatch.syspath_prepend(str(FOLDER))
    from checklist import Checklist

    return Checklist


@pytest.mark.parametrize(("facts", "code"), [([True, True], 0), ([True, False, True], 1)])
def test_one_failed_check_fails_the_program(checklist, facts, code, capsys):
    report = checklist()
    for fact in facts:
        report.check("as it should be", fact)
    with pytest.raises(SystemExit) as end:
        report.end()
    assert end.value.code == code
    words = ["passed" if fact else "FAILED" for fact in facts]
    assert capsys.readouterr().out.splitlines() == [f"{word}  as it should be" for word in words]


@pytest.mark.usefixtures("checklist")
def test_the_smallest_difference_is_noticed():
    from checklist import same_bits

    ones = torch.ones(3)
    assert same_bits([ones, 0.5], [ones.clone(), 0.5])
    assert not same_bits([ones], [torch.nextafter(ones, 2 * ones)])
    assert not same_bits([0.1], [0.1 + 2**-56])
    assert not same_bits([torch.zeros(1)], [-torch.zeros(1)])
    assert not same_bits([], [])
    with pytest.raises(ValueError, match="shorter"):
        same_bits([ones, ones], [ones])


@pytest.mark.slow
@pytest.mark.usefixtures("checklist")
def test_the_examples_networks_are_the_same_each_time():
    pytest.importorskip("sklearn")
    from checklist import same_bits
    from digits import dataset, network

    assert same_bits(network().state_dict().values(), network().state_dict().values())
    assert len(dataset()) == 1797
    assert isinstance(dpfuse.DistributedDataParallel(network()), nn.parallel.DistributedDataParallel)
