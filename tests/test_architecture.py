"""Reads every import of the packages and fails on an arrow that the design does not allow."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

import dpfuse

ROOT = Path(__file__).parent.parent
ANYWHERE = {"errors", "version"}  # of dpfuse, open to all of it
FOLDERS = {"buckets", "ddp", "liveness"}  # whose files have rules of their own

# What a file may import besides the standard library and ANYWHERE. A name with a dot is a package's; others are
# files of dpfuse. Every file must match a rule, or the test fails.
ALLOWED = {
    "errors": set(),
    "version": set(),
    "param_spec": set(),
    "bucket_rule": set(),
    "plan": {"param_spec", "bucket_rule"},
    "averaging": set(),
    "wire": {"torch", "averaging"},
    "error_feedback": {"torch"},
    "residual": {"torch", "dpfuse_kernels", "error_feedback", "plan"},
    "whereabouts": set(),
    "diagnosis": {"whereabouts"},
    "sighting": set(),
    "line": set(),
    "meeting": {"distributed"},
    "ending": {"heartbeat (types)"},
    "progress": {"torch"},
    "patience": {"torch", "diagnosis", "ending", "progress", "whereabouts"},
    "heartbeat": {"diagnosis", "sighting", "whereabouts"},
    "hub": {"diagnosis", "heartbeat", "line", "meeting"},
    "spoke": {"diagnosis", "heartbeat", "line", "meeting"},
    "lookout": {
        "torch", "agreement", "ending", "heartbeat", "hub", "meeting", "patience", "spoke", "whereabouts",
    },
    "collective": {"torch", "patience", "whereabouts"},
    "autograd": {"torch", "tracing"},
    "signature": {"torch"},
    "state_dict": {"torch", "numpy"},
    "canary": set(),
    "tail": {"torch", "canary", "writing_streams"},
    "registered_memory": {"torch"},
    "writing_streams": {"torch"},
    "landing": {"torch"},
    "timing": {"torch", "landing", "wrapper (types)"},
    "agreement": {"torch", "collective"},
    "finite_check": {"torch", "dpfuse_kernels", "verdict", "writing_streams"},
    "grad_norm": {
        "torch", "dpfuse_kernels", "phase", "bucket (types)", "reducer (types)", "signature (types)",
    },
    "loss_scale": {"torch", "grad_norm (types)", "tracing"},
    "gradient_factors": {
        "torch", "dpfuse_kernels", "canary", "grad_norm", "loss_scale", "reducer (types)", "tail (types)",
        "gradient_weight", "phase",
    },
    "gradient_weight": {"torch", "tail (types)", "verdict", "writing_streams"},
    "grad_scaler": {"torch", "loss_scale", "tracing", "wrapper"},
    "memory_order": {"torch"},
    "flat_buffer": {
        "memory_order", "torch", "dpfuse_kernels", "plan", "averaging", "registered_memory", "tail", "writing_streams",
    },
    "bucket": {
        "memory_order", "torch", "dpfuse_kernels", "plan", "averaging", "collective", "tail", "timing",
        "writing_streams", "early_unpack", "finite_check", "patience", "whereabouts", "residual",
        "ranges", "gradient_factors (types)", "bucket_state", "flat_buffer",
        "square_sum",
    },
    "square_sum": {"torch", "writing_streams"},
    "ranges": {"torch"},
    "bucket_state": set(),
    "early_unpack": {"torch", "collective", "ownership", "writing_streams"},
    "ownership": {"torch"},
    "device_guard": {"torch", "dpfuse_kernels"},
    "sparse_bucket": {"torch", "averaging", "bucket", "collective", "patience"},
    "in_place_bucket": {
        "memory_order", "torch", "dpfuse_kernels", "plan", "averaging", "bucket", "collective", "tail", "ownership",
        "finite_check",
    },
    "comm_bucket": {"torch"},
    "comm_hook": {"torch", "comm_bucket"},
    "hooked_bucket": {
        "torch", "dpfuse_kernels", "plan", "averaging", "bucket", "comm_bucket", "comm_hook", "landing", "patience",
    },
    "tail_bucket": {"torch", "plan", "averaging", "bucket", "canary", "collective", "comm_hook", "tail", "patience"},
    "quantized_bucket": {"torch", "dpfuse_kernels", "plan", "ordered_bucket"},
    "ordered_bucket": {"torch", "dpfuse_kernels", "plan", "bucket", "collective"},
    "eager_bucket": {
        "torch", "dpfuse_kernels", "averaging", "bucket", "bucket_state", "errors", "ordered_bucket", "plan", "tracing",
    },
    "accumulating_bucket": {
        "memory_order", "torch", "dpfuse_kernels", "averaging", "bucket", "ordered_bucket", "ranges", "tracing",
        "writing_streams",
    },
    "kinds": {
        "torch", "plan", "averaging", "bucket", "sparse_bucket", "hooked_bucket", "comm_hook", "tail", "tail_bucket",
        "in_place_bucket", "ordered_bucket", "accumulating_bucket", "eager_bucket", "early_unpack", "canary", "wire",
        "error_feedback", "residual", "quantized_bucket",
    },
    "hooks": {"torch", "collective"},
    "verdict": {"canary"},
    "phase": set(),
    "countdown": set(),
    "local_backward": {
        "countdown", "phase", "tracing", "verdict", "accumulating_bucket", "bucket (types)", "canary (types)",
    },
    "reducer": {
        "bucket (types)", "canary (types)", "countdown", "phase", "tail (types)", "verdict", "tracing", "whereabouts",
        "local_backward",
    },
    "fused_allreduce": {
        "torch", "param_spec", "plan", "averaging", "memory_order", "kinds", "agreement", "collective", "wire",
        "accumulating_bucket",
    },
    "replicas": {"torch", "dpfuse_kernels", "param_spec", "plan", "averaging", "memory_order"},
    "model_check": {"torch", "averaging", "param_spec", "plan", "sync_options (types)"},
    "sync_options": {"torch", "averaging", "bucket_rule", "plan", "wire"},
    "model_agreement": {"torch", "agreement", "collective", "lookout", "model_check", "plan", "sync_options"},
    "model_change": {"torch", "agreement", "plan"},
    "buffer_sync": {"torch", "collective"},
    "grad_sync": {
        "model_agreement",
        "torch", "plan", "averaging", "bucket", "kinds", "agreement", "collective", "reducer", "autograd",
        "signature", "timing", "comm_hook", "model_check", "model_change", "buffer_sync",
        "canary", "phase", "sync_options", "device_guard", "finite_check", "grad_norm", "whereabouts",
        "error_feedback", "gradient_factors", "accumulating_bucket", "square_sum",
    },
    "tracing": {"torch"},
    "wrapper": {
        "torch", "grad_sync", "model_agreement", "model_check", "agreement", "collective", "plan", "reducer", "timing",
        "tracing", "canary", "sync_options", "grad_norm", "loss_scale", "registered_memory", "tune (types)",
        "gradient_weight", "error_feedback",
    },
    "data_parallel": {"torch", "wrapper", "sync_options", "collective", "state_dict", "tune"},
    "backward_optimizers": {"torch"},
    "buffer_hook": {"torch"},
    "mixed_precision": {"torch", "averaging", "tracing", "autograd (types)"},
    "torch_buckets": {"torch", "bucket_rule", "plan"},
    "torch_hooks": {
        "torch", "torch_names", "collective", "comm_hook", "buffer_hook", "backward_optimizers", "grad_sync",
    },
    "torch_names": {"torch", "wrapper", "grad_sync", "collective", "phase", "logging_data"},
    "logging_data": {"torch", "plan (types)", "torch_names (types)"},
    "placement": {"torch", "collective"},
    "join_hook": {
        "torch", "collective", "patience", "whereabouts", "distributed_data_parallel (types)", "grad_sync (types)",
    },
    "distributed_data_parallel": {
        "torch", "wrapper", "agreement", "sync_options", "join_hook", "placement", "state_dict", "torch_hooks",
        "torch_buckets", "mixed_precision", "tracing",
    },
    "checkpoint_folder": {"torch"},
    "random_state": {"torch", "numpy"},
    "training_state": {"torch", "wrapper"},
    "checkpoint": {
        "torch", "agreement", "collective", "checkpoint_folder", "random_state", "training_state", "wrapper",
    },
    "launch": {"distributed"},
    "patch": {"torch", "distributed_data_parallel"},
    "__init__": {
        "data_parallel", "distributed_data_parallel", "fused_allreduce", "param_spec", "plan", "replicas", "timing",
        "distributed", "checkpoint", "tune", "public", "grad_scaler",
    },
    "distributed": {"torch", "distributed"},
    # Users of the library: its public names, `dpfuse` and `dpfuse.distributed`, and the launcher's door.
    "paddle": {"torch", "numpy", "rich", "__init__", "public", "distributed", "launch", "paddle"},
    "integrations": {"torch", "public"},
    "tune": {
        "torch", "numpy", "matplotlib", "averaging", "param_spec", "plan", "agreement", "collective", "landing",
        "autograd (types)", "grad_sync (types)", "timing (types)", "wrapper (types)", "public", "tune",
    },
    # The command line: what a user could write, and the doors to it.
    "commands": {
        "torch", "matplotlib", "plan", "bucket_rule", "agreement", "collective", "distributed", "tune",
        "__init__", "public", "commands",
    },
    "__main__": {"commands"},
    "bench": {"commands"},
    "kernels": {"torch", "triton", "kernels"},
}  # fmt: skip


def rule_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if parts[0] == "kernels":
        return "kernels"
    return parts[1] if len(parts) > 2 and parts[1] not in FOLDERS else path.stem


def arrows(path: Path) -> set[str]:
    """What the file imports, by the names used in ALLOWED."""
    tree = ast.parse(path.read_text())
    types_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            packages = ("dpfuse", *(f"dpfuse.{folder}" for folder in FOLDERS))
            modules = [f"{node.module}.{alias.name}" for alias in node.names] if node.module in packages else []
            modules = modules or [node.module or ""]
        else:
            continue
        for module in modules:
            head, *rest = module.split(".")
            if head == "dpfuse":
                rest = rest[1:] if rest and rest[0] in FOLDERS else rest
                name = rest[0] if rest else "__init__"
                name = "public" if name in dpfuse.__all__ else name
            elif head == "dpfuse_kernels":
                name = "kernels" if rule_of(path) == "kernels" else "dpfuse_kernels"
            elif head in ("torch", "triton", "numpy", "rich", "sklearn", "matplotlib"):
                name = head
            else:
                continue
            found.add(f"{name} (types)" if id(node) in types_only else name)
    return found - ANYWHERE - {f"{name} (types)" for name in ANYWHERE}


SOURCES = sorted([*(ROOT / "dpfuse").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_only_where_the_design_allows(path):
    allowed = ALLOWED[rule_of(path)]
    forbidden = {name for name in arrows(path) if name not in allowed and name.removesuffix(" (types)") not in allowed}
    assert not forbidden


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_readable(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 400
    assert path.name == "__init__.py" or lines[0].startswith('"""')


def test_the_paddle_wing_uses_only_public_names():
    """Of dpfuse.distributed, too, it takes what the package exports."""
    inner = re.compile(r"^\s*(from|import) dpfuse\.distributed\.", re.MULTILINE)
    assert [path for path in SOURCES if rule_of(path) == "paddle" and inner.search(path.read_text())] == []


def test_there_is_no_package_called_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_only_one_file_calls_collectives():
    """One of the library; the wing, a user of it like any other, has one for each of its systems that needs any."""
    calls = re.compile(
        r"\b(dist|group|torch\.distributed)\.(all_\w+|broadcast\w*|reduce\w*|barrier|gather\w*|scatter\w*)\("
    )
    callers = {path for path in SOURCES if calls.search(path.read_text()) and rule_of(path) != "distributed"}
    assert {str(path.relative_to(ROOT / "dpfuse")) for path in callers} == {
        "collective.py", "paddle/gathered.py", "paddle/distributed/fleet/collective.py"
    }  # fmt: skip


def test_nothing_that_peers_send_is_unpickled():
    """spawn() may read what its own children wrote into a folder of its own; no peer of a group is trusted so."""
    objects = re.compile(r"_object(_list)?\(|\bpickle\.loads?\(|\beval\([^)]")
    assert {path.name for path in SOURCES if objects.search(path.read_text())} == {"context.py"}


def test_the_tree_names_no_place_outside_of_it():
    """No path of some machine, no host of a package registry, no folder beside the checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout.decode()
    if not listed:
        pytest.skip("not a git checkout")
    words = re.compile("|".join([r"\.\./" + "shared", "/work" + "/", "pypi" + r"\.org", "files\\.python" + "hosted"]))
    guilty = [
        name
        for name in listed.split("\0")
        if name and (ROOT / name).is_file() and words.search((ROOT / name).read_text(errors="ignore"))
    ]
    assert guilty == []
