"""What is planted for the doctor, what it must say of each program, and how one is examined."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tests.commands.programs import PROGRAMS
from tests.distributed.processes import free_port, python, run

__all__ = ["BUSY", "HEALTHY", "PLANTED", "Case", "Diagnosis", "examine"]

STEPS = 32
# The doctor starts processes by `sys.executable`.
DOCTOR = """
import os, sys
sys.executable = os.environ["PYTHON_EXEC"]
from dpfuse.commands.command_line import main
sys.exit(main(sys.argv[1:]))
"""
DRIFT = "DPF-W01|the weights of the ranks differ"


@dataclass(frozen=True)
class Case:
    """One program.

    Args:
        kind: "loop", "finite", "drift", "link", "numbers", "itself", "steps", "slow", "means", "own", "fails" or
            "healthy".
        program: its command line, in the folder of the programs; a folder is a package, and {port} a free port.
        said: a pattern that the terminal must show, with spaces for line breaks.
        finding: a pattern that the code or title of a finding must have; "" if nothing may be found.
        results: what the report may say of the numbers; None: nothing.
        ranks: to start.
        own_ranks: whether the program starts them.
        warm: whether its processes are forks of one that has imported torch, which share the seed of Python's hashes.
    """

    kind: str
    program: str
    said: str
    finding: str = ""
    results: tuple[str | None, ...] = ("equal",)
    ranks: int = 2
    own_ranks: bool = False
    warm: bool = True

    @property
    def name(self) -> str:
        """For people."""
        words = re.sub(r"^(planted|healthy|means)\.py ", "", self.program).split(" {")[0].replace("_", " ")
        if words.endswith(" ours"):
            words = f"{words.removesuffix(' ours')}, our class"
        return f"{self.kind}: {words}{f', {self.ranks} ranks' if self.kind == 'healthy' or self.ranks > 2 else ''}"


LOOPS = {
    "switch_behind_the_forward": "DPF-L01",
    "whole_training_in_no_sync": "DPF-L02",
    "forward_in_no_sync_and_backward_behind_it": "DPF-L02",
    "last_batches_of_an_epoch_are_not_averaged": "DPF-L03",
    "last_batches_of_an_epoch_are_zeroed": "DPF-L03",
    "optimizer_of_the_head_alone": "DPF-L04",
    "loader_without_a_distributed_sampler": "DPF-L05",
    "clipping_after_each_batch": "DPF-L06",
    "schedule_that_sees_the_loss_of_its_rank": "DPF-L07",
    "rank_0_stays_in_eval_mode": "DPF-L08",
    "each_rank_wraps_with_a_group_of_its_own": "DPF-L09",
    "epoch_of_the_sampler_is_not_set": "DPF-L11",
}
OF_CALLS = {  # the code, and the first step that is named
    "never_zeroed": ("DPF-L12", 1),
    "zeroed_once_an_epoch": ("DPF-L12", 1),
    "critic_is_never_zeroed": ("DPF-L12", 2),
    "zeroed_before_each_batch": ("DPF-L13", 1),
    "zeroed_after_each_batch_and_scaled": ("DPF-L13", 1),
    "zeroed_one_batch_late": ("DPF-L13", 1),
    "norm_clipped_before_unscaling": ("DPF-L14", 1),
    "values_clipped_before_the_step_of_a_scaler": ("DPF-L14", 1),
    "schedule_stepped_after_each_batch": ("DPF-L15", 1),
    "warm_up_stepped_inside_the_window": ("DPF-L15", 1),
}
NEVER_OF_RIGHT = ("DPF-L12", "DPF-L13", "DPF-L14", "DPF-L15")  # remarks, too
ADVICE = ("DPF-L02", "DPF-L03", "DPF-L04", "DPF-L06")  # it may be meant so
FINITE = {  # what the terminal shows, and the finding
    "float16_overflows_on_rank_1": (
        "not finite since step 5, rank 1: in step 5 the loss was (inf|nan) on rank 1, and SGD stepped on it: the "
        "gradient of 0.weight,",
        "not finite since step 5, rank 1",
    ),
    "scaler_that_skips_half": (
        r"the GradScaler skipped \d+ of \d+ steps of SGD, since gradients were not finite; first the loss on rank 1, ",
        "a GradScaler skips steps",
    ),
}
DRIFTS = (
    "a_weight_is_edited", "another_learning_rate", "a_step_is_left_out", "gradients_are_clipped",
    "a_gradient_is_changed_behind_backward", "states_are_loaded", "weights_get_noise",
    "one_rank_freezes_a_layer_for_its_optimizer",
)  # fmt: skip
LINKS = {  # seconds per message, bytes per second, width of the layers: on one rank, which no other one delays
    "slow_link.py 1e-4 20e6 256": "the link is the limit.* send 16 bits: a step took",
    "slow_link.py 1e-3 100e6 512": "the link is the limit.* send 16 bits: a step took",
    "slow_link.py 5e-2 1e9 32": "the link is the limit, by its latency.* average once in 2 batches",
    "slow_link.py 2e-2 1e9 64": "the link is the limit.* average once in 2 batches",
}
CLASSES = {
    "another_rate": "settings",
    "other_targets": "data",
    "scaled_gradients": "optimizer",
    "another_backward": "kernel",
}
ITSELF = {
    "the_clock_in_the_inputs": r"step 5, rank 0: the inputs of the forward \(class: data\)",
    "a_seed_of_the_system": r"step 0, rank 0: the inputs of the forward \(class: data\)",
    "the_order_of_a_set": r"step 0, rank 0: the inputs of the forward \(class: data\)",
    "a_race_of_two_threads": r"step \d+, rank \d: the inputs of the forward \(class: data\)",
}
STEPPING = {"rank_1_never_steps": "unknown", "rank_0_never_steps": "unknown", "rank_1_stops_stepping": "equal"}
SLOW = {
    "the_loader_is_slow": r"the loader is slow: each step waits [\d.]+ ms for its batch \(planted.py:\d+\)",
    "the_forward_of_rank_1_is_slow": r"a rank is slow: rank 1 is the slowest .* in its forward \(planted.py:\d+\)",
}
TWICE = "gradients are averaged twice"
AGAIN = {  # what takes the mean again, and, by class, on how many ranks it is run
    "mean_taken_again": {"": (2, 3), " ours": (2,)},
    "mean_of_divided_gradients_taken_again": {"": (2,), " ours": (3,)},
    "sum_taken_again_of_flat_gradients": {"": (2,), " ours": (2,)},
    "mean_taken_again_in_fused_buffers": {"": (2,), " ours": (2, 3)},
    "mean_taken_again_of_gathered_gradients": {"": (3,), " ours": (2,)},
    "mean_taken_again_of_a_gathered_tensor": {"": (2,)},
    "mean_taken_again_on_rank_0_and_sent": {"": (2,), " ours": (3,)},
}
RATES = r"DPF-W01|other learning rates"
OWN = {  # programs that use our class: what is said, the finding, and of the numbers
    "own_class_and_another_rate": (DRIFT, DRIFT, "equal"),
    "own_class_that_sends_16_bits": ("The program passes wire_dtype, which torch's class does not have", "", "unknown"),
    "own_class_and_a_branch": (
        "fails under torch DDP, which stands in the place of dpfuse's class, .* makes all its 32 steps",
        "a warning of dpfuse", None,
    ),
}  # fmt: skip
FAILS = {  # under torch's class: what is said, and the finding
    "evaluation_on_rank_0_alone": (r"3 on rank 0, 0 on rank 1 times \(planted.py:\d+\)", "some ranks alone call"),
    "fewer_batches_on_rank_1": (r"model\.join\(\)", "an error of dpfuse"),
    "a_layer_that_is_not_used": (r"never.weight, never.bias of model 0 \(Net\)", "unused parameters"),
    "barrier_in_the_save_of_rank_0": ("rank", "an error of dpfuse"),
    "wider_layer_on_rank_1": (r"0\.weight", "an error of dpfuse"),
}
FAILING = {  # on how many ranks these are run, by class
    "evaluation_on_rank_0_alone": {"": (2,), " ours": (2,)},
    "fewer_batches_on_rank_1": {"": (2, 3), " ours": (2,)},
    "a_layer_that_is_not_used": {"": (2,), " ours": (2,)},
    "barrier_in_the_save_of_rank_0": {"": (2,), " ours": (3,)},
    "wider_layer_on_rank_1": {"": (2, 3), " ours": (2,)},
}
BUSY = "nothing, as the machine was busy"
TIMED = ("link", "slow")  # kinds of which nothing is said on a busy machine
SHAPES = {
    "gan.py {settings}": False,
    "contrast": False,
    "momentum_encoder.py {ranks} {port} 1000": True,
    "language_model.py": False,
    "trainer.py --epochs 40": False,
}
SHOWN = {"gan.py {settings}": r"(in \d+ steps of 2 optimizers|Within rounding).* nothing was found"}
NEAR = (  # to the calls of wrong programs
    "gradients_dropped_by_hand", "gradients_zeroed_by_hand", "running_mean_in_the_gradients",
    "each_of_two_zeroes_the_other", "extragradient", "attack_on_the_inputs", "gradients_of_two_batches_combined",
    "newton_with_other_batches", "limit_times_the_scale", "norm_for_a_log_and_a_scaler_that_is_off",
    "two_schedules_after_each_step", "schedule_that_counts_a_scaler_that_skips",
)  # fmt: skip
RIGHT = (
    *NEAR,
    "plain", "accumulation_with_zeros_kept", "scaler_that_skips_a_step", "gradients_read_for_a_log",
    "penalty_in_no_sync_before", "sharpness_aware_minimisation", "optimizers_of_different_cadence",
    "ema_and_evaluation", "one_batch_overfitted_on_purpose", "average_by_hand", "local_sgd_by_hand",
    "post_local_sgd_of_torch", "states_of_the_optimizer_on_one_rank_each", "ranks_with_fewer_batches",
    "parameters_that_are_seldom_used", "backbone_frozen_in_the_beginning",
    "batch_normalization_dropout_and_a_schedule", "sampler_with_its_epoch",
    "samplers_in_order_and_of_a_validation", "last_batches_of_an_epoch_are_averaged",
    "gradients_masked_after_each_batch", "sparse_embedding",
    "state_of_a_recurrent_net", "closures", "own_class", "own_class_of_paddle_names",
)  # fmt: skip
MEANS = (  # of something else than gradients that the backward has averaged
    "mean_of_losses_and_metrics", "gradients_compared_and_scaled", "flat_gradients_added_up_for_a_log",
    "noise_of_each_rank_averaged", "head_that_no_wrapper_has", "only_mean_in_fused_buffers",
    "only_mean_of_gathered_gradients", "only_mean_on_rank_0_and_sent", "means_of_each_of_two_models",
)  # fmt: skip


def _said(name: str, code: str, step: int, file: str = "planted.py") -> str:
    """What is said of a program about the line that its source marks."""
    lines = (PROGRAMS / file).read_text(encoding="utf-8").splitlines()
    begin = lines.index(f"def {name}(rank, size):")
    line = next(number for number in range(begin, len(lines)) if lines[number].endswith("# here")) + 1
    return rf"{code}: [^.]*\bsteps? {step}\b[^.]*\({re.escape(file)}:{line}\)"


def _ways(by_class: dict[str, tuple[int, ...]]) -> list[tuple[str, int]]:
    """The classes and numbers of ranks with which a program is run."""
    return [(kind, ranks) for kind, counts in by_class.items() for ranks in counts]


def _equal(ranks: int) -> tuple[str, ...]:
    """What may be said of the numbers of a program that computes the same with both classes."""
    return ("equal",) if ranks == 2 else ("equal", "close")


def _rates(ranks: int) -> str:
    """What is said where each rank has another rate: which one has which."""
    return "differ between ranks, first in step 0: " + ", ".join(
        rf"rank {rank} has {0.01 * (rank + 1)}" for rank in range(ranks)
    )


PLANTED = [
    *(Case("loop", f"planted.py {name}", code, "" if code in ADVICE else code) for name, code in LOOPS.items()),
    *(Case("loop", f"planted.py {name}", _said(name, *seen)) for name, seen in OF_CALLS.items()),
    Case("loop", "planted.py hook_clamps_gradients_of_rank_0", "on rank 0 alone, hooks of the program change"),
    *(Case("finite", f"planted.py {name}", said, finding) for name, (said, finding) in FINITE.items()),
    *(Case("drift", f"planted.py {name}", DRIFT, f"{DRIFT}|a rank leaves out steps") for name in DRIFTS),
    *(Case("link", program, said, "a group of one rank", ranks=1) for program, said in LINKS.items()),
    *(
        Case("numbers", f"planted.py under_dpfuse_{name}", rf"NO\. .* step 5, .*\(class: {kind}\)", "", ("different",))
        for name, kind in CLASSES.items()
    ),
    *(
        Case(
            "itself", f"planted.py {name}", f"The program differs from itself: .*{place}", "", ("itself",),
            warm=name != "the_order_of_a_set",
        )
        for name, place in ITSELF.items()
    ),
    *(
        Case("steps", f"planted.py {name}", r"rank \d ma(kes no step|de \d+ of)", "a rank leaves out", (result,))
        for name, result in STEPPING.items()
    ),
    Case("link", "planted.py accumulation_without_no_sync", "DPF-L10"),
    *(Case("slow", f"planted.py {name}", said, said.partition(":")[0]) for name, said in SLOW.items()),
    *(
        Case("means", f"means.py {name}{kind}", _said(name, TWICE, 1, "means.py"), TWICE, _equal(ranks), ranks)
        for name, by_class in AGAIN.items()
        for kind, ranks in _ways(by_class)
    ),
    *(Case("own", f"planted.py {name}", said, finding, (result,)) for name, (said, finding, result) in OWN.items()),
    Case("own", "planted.py epoch_of_the_sampler_is_not_set ours", "DPF-L11", "DPF-L11"),
    *(
        Case("own", f"planted.py another_rate_from_the_start{kind}", _rates(ranks), RATES, _equal(ranks), ranks)
        for kind, ranks in (("", 2), ("", 3), (" ours", 2))
    ),
    *(
        Case("fails", f"planted.py {name}{kind}", said, finding, (None,), ranks)
        for name, (said, finding) in FAILS.items()
        for kind, ranks in _ways(FAILING[name])
    ),
]  # fmt: skip
HEALTHY = [
    Case("healthy", program, SHOWN.get(program, "nothing was found"), "", _equal(ranks), ranks, own)
    for ranks in (2, 3)
    for program, own in {
        **SHAPES,
        **{f"healthy.py {name}": False for name in RIGHT},
        **{f"means.py {name}": False for name in MEANS},
    }.items()
]


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor has said.

    Args:
        complaints: what is wrong with it; empty if it is right.
        said: the finding, or what it says of the numbers or the link, in a few words.
        terminal: what it printed.
        seconds: of all runs.
    """

    complaints: tuple[str, ...]
    said: str
    terminal: str
    seconds: float


def examine(case: Case, folder: Path, steps: int = STEPS) -> Diagnosis:
    """Run the doctor on a program."""
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"seed": 1, "lr": 0.002, "steps": 1000}))
    words = case.program.format(settings=settings, ranks=case.ranks, port=free_port()).split()
    options = ["--own_ranks"] if case.own_ranks else ["--patience", "30"] if case.kind == "fails" else []
    options += ["-m"] if not words[0].endswith(".py") else []
    options += [*words, "--steps", "1000"] if words[0] == "contrast" else words
    out = folder / "report"
    command = ["doctor", "--ranks", case.ranks, "--steps", steps, "--out", out, *options]
    variables = {"PYTHON_EXEC": python(warm=case.warm), "WARM_STARTUP": "1", "OMP_NUM_THREADS": "1"}
    done = run("-c", DOCTOR, *command, folder=PROGRAMS, timeout=400, warm=case.warm, **variables)
    report = json.loads((out / "report.json").read_text())
    terminal = re.sub(r"\s+", " ", done.stdout)
    found = [f"{one['code']} {one['title']}" for one in report["findings"]]
    result = (report["numbers"] or {}).get("result")
    complaints = []
    is_busy = "nothing is said of the speed" in terminal  # which is right, and leaves nothing to look at
    if is_busy and case.kind in TIMED:
        return Diagnosis((), BUSY, done.stdout + done.stderr, 0.0)
    if not re.search(case.said, terminal):
        complaints.append(f"the terminal does not say {case.said!r}")
    if result not in case.results:
        complaints.append(f"the numbers are {result!r}, expected one of {case.results}")
    if not case.finding and found:
        complaints.append(f"it has found {found}")
    unlike = [
        one["code"] for one in report["remarks"] if one["code"] in NEVER_OF_RIGHT and one["code"] not in case.said
    ]
    if unlike:
        complaints.append(f"it may be meant so: {unlike}")
    if case.finding and not any(re.search(case.finding, one) for one in found):
        complaints.append(f"no finding is {case.finding!r}, but {found}")
    seconds = sum(one["seconds"] for one in report["runs"])
    said = found or [f"{one['code']} {one['title']}" for one in report["remarks"]]
    said = [] if case.kind in ("link", "numbers", "itself") else said
    link = terminal.partition("step waits for it: ")[2].partition(" buckets ")[0]
    text = "; ".join(said) or {"link": link}.get(case.kind) or (report["numbers"] or {}).get("text", report["failure"])
    return Diagnosis(tuple(complaints), text.strip(), done.stdout + done.stderr, seconds)
