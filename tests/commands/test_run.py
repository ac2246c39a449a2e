"""`dpfuse run`: programs that know nothing of it run as under plain Python, and their weights are those of DDP."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import warnings
from types import SimpleNamespace

import pytest

from dpfuse.commands import replacement
from dpfuse.commands.command_line import main
from dpfuse.commands.run_command import _interpreter_flags
from dpfuse.errors import LoopWarning, WeightsWarning
from dpfuse.startup import FOLDER, startup_variables
from dpfuse.trace_file import read_folder
from tests.commands.programs import PROGRAMS
from tests.commands.side_by_side import REPLACED, assert_same, python
from tests.distributed.processes import all_gone, clean_environment, family, free_port, start
from tests.patience import patience


@pytest.fixture
def gan_settings(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"seed": 1, "lr": 0.002, "steps": 4}))
    return path


@pytest.mark.slow
def test_two_wrappers_settings_and_another_folder(gan_settings):
    warm = {"warm": True, "warm_ranks": True}  # with the variables of `dpfuse run`, ranks are usual processes
    plain = python("-m", "dpfuse.launch", "--nproc_per_node", 2, "gan.py", gan_settings, **warm)
    ours = python("-m", "dpfuse", "run", "--ranks", 2, "gan.py", gan_settings, **warm)
    assert_same(plain, ours, "Sequential and Sequential")


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)  # its port is not that of other tests


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["-m", "contrast", "--steps", 4], "Towers"),
        (["language_model.py"], "Model"),
        (["trainer.py", "--epochs", 2, "--workers", 1], "Sequential"),
    ],
    ids=["contrastive package", "language model", "trainer"],
)
def test_ranks_of_torchrun(words, name):
    plain = python(*TORCHRUN, *words)
    ours = python(*TORCHRUN, "-m", "dpfuse", "run", *words)
    assert_same(plain, ours, name)


@pytest.mark.slow
def test_a_file_of_settings_that_is_run_and_the_launchers_flag(tmp_path):
    (tmp_path / "settings.py").write_text("steps, micro_steps, width = 3, 2, 8")
    words = ["language_model.py", tmp_path / "settings.py"]
    plain = python(*TORCHRUN, *words)
    ours = python("-m", "dpfuse.launch", "--nproc_per_node", 2, "--patch", *words)
    assert_same(plain, ours, "Model")


@pytest.mark.slow
def test_a_program_that_starts_its_own_ranks():
    words = ["momentum_encoder.py", 2]
    plain = python(*words, free_port(), 4)
    ours = python("-m", "dpfuse", "run", *words, free_port(), 4)
    assert_same(plain, ours, "Pair")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "words", "name"),
    [
        ("transformers", ["hf_trainer.py", "OUT", 4], "LlamaForCausalLM"),
        ("accelerate", ["accelerated.py", 1], "Sequential"),
    ],
)
def test_libraries_that_wrap_the_model_themselves(library, words, name, tmp_path):
    pytest.importorskip(library)
    words = [tmp_path if word == "OUT" else word for word in words]
    plain = python(*TORCHRUN, *words)
    ours = python(*TORCHRUN, "-m", "dpfuse", "run", *words)
    assert_same(plain, ours, name)


@pytest.mark.slow
def test_a_library_that_starts_the_program_again_as_the_second_rank():
    pytest.importorskip("lightning")
    words = ["lightning_loop.py", 4]
    plain = python(*words)
    ours = python("-m", "dpfuse", "run", *words)
    assert_same(plain, ours, "Module")


SEEN = """
import json, os, sys
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], __spec__ and __spec__.name, sys.flags.dev_mode,
                  sys.flags.optimize, [path for path in sys.path if "at_startup" in path], os.getcwd(),
                  sorted(globals())]))
print("torch" in sys.modules, "dpfuse" in sys.modules, "sitecustomize of the user" in os.environ.get("SEEN", ""))
sys.stderr.write("on stderr")
"""


def test_the_program_sees_what_plain_python_shows_it(tmp_path):
    (tmp_path / "seen.py").write_text(SEEN)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(SEEN)
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os; os.environ['SEEN'] = 'sitecustomize of the user'")
    path = os.pathsep.join([str(own), clean_environment()["PYTHONPATH"]])
    for flags, words in ((["-X", "dev"], ["seen.py", "--x", "a b"]), (["-O"], ["-m", "package", "-m", "--ranks"])):
        plain = python(*flags, *words, folder=tmp_path, PYTHONPATH=path)
        ours = python(*flags, "-m", "dpfuse", "run", *words, folder=tmp_path, PYTHONPATH=path)
        assert plain.stdout.endswith("False False True\n")
        assert ours.stdout == plain.stdout
        assert ours.stderr.endswith("on stderr")
        assert "dpfuse" not in ours.stderr


def test_a_folder_with_a_main_file_runs_on_ranks_as_under_python(tmp_path):
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "beside.py").write_text("")
    seen = "import beside, os, sys; print([__name__, __file__, sys.argv, os.path.abspath(sys.path[0])])"
    (tmp_path / "program" / "__main__.py").write_text(seen)
    plain = python("program", "--x", folder=tmp_path)
    warm = {"warm": True, "warm_ranks": True}
    ours = python("-m", "dpfuse", "run", "--ranks", 1, "program", "--x", folder=tmp_path, **warm)
    assert (plain.returncode, ours.returncode, ours.stdout) == (0, 0, plain.stdout), ours.stderr


def test_exit_codes_signals_and_texts_of_errors_pass_through(tmp_path):
    (tmp_path / "ends.py").write_text(
        "import os, sys\nif sys.argv[1] == 'kill':\n    os.kill(os.getpid(), int(sys.argv[2]))\nsys.exit(sys.argv[1])"
    )
    (tmp_path / "raises.py").write_text("raise ValueError('mine')")
    for words in (["ends.py", "mine"], ["ends.py", "kill", int(signal.SIGTERM)], ["raises.py"]):
        plain = python(*words, folder=tmp_path)
        ours = python("-m", "dpfuse", "run", *words, folder=tmp_path, warm=True)  # the program is a usual process
        assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)
        assert plain.returncode != 0


REPLACING = """
import os, subprocess, sys
if sys.argv[1] == "outer":
    sys.exit(subprocess.run([sys.executable, __file__, "inner"]).returncode)
if sys.argv[1] == "inner":
    from dpfuse import DataParallel  # before torch
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
os.environ["RANK"] = "0"
if sys.argv[1] == "inner":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(2):
        print(type(DistributedDataParallel(torch.nn.Linear(2, 2))).__module__.split(".")[0])
    dist.destroy_process_group()
else:
    torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1).step()
"""


@pytest.mark.slow
def test_processes_of_the_program_are_reached_and_the_message_comes_once(tmp_path):
    (tmp_path / "replacing.py").write_text(REPLACING)
    done = python("-m", "dpfuse", "run", "replacing.py", "outer", folder=tmp_path, warm=True)
    assert (done.returncode, done.stdout) == (0, "dpfuse\ndpfuse\n"), done.stderr
    assert REPLACED.findall(done.stderr) == ["Linear and Linear"]
    assert "(replacing.py:13): 4 parameters" in done.stderr
    (tmp_path / "compiler.py").write_text("import torch")
    variables = startup_variables("dpfuse.commands.replacement", clean_environment())
    done = python("compiler.py", folder=tmp_path, RANK="0", DPFUSE_STARTUP_RANK="0", **variables)
    assert done.stderr == ""
    done = python("replacing.py", "none", folder=tmp_path, **variables)
    assert done.stderr == (
        "dpfuse run: this program has made no DistributedDataParallel on rank 0, so dpfuse has replaced nothing\n"
    )


PART_FIRST = """
from dpfuse.ddp import DistributedDataParallel
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(type(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))) is DistributedDataParallel)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_program_may_import_a_part_of_dpfuse_before_torch(tmp_path):
    (tmp_path / "part_first.py").write_text(PART_FIRST)
    done = python("-m", "dpfuse", "run", "part_first.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


SOME_STAY = """
import importlib.util
importlib.util.find_spec("torch")  # as transformers does
import copy, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
class Derived(DistributedDataParallel):
    pass
dist.init_process_group("gloo")
ours = DistributedDataParallel(torch.nn.Linear(2, 2))
for _ in range(2):
    derived = Derived(torch.nn.Linear(2, 2))
copied = copy.deepcopy(derived)
print(type(ours).__module__.split(".")[0] + "\\n", end="")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_look_for_torch_changes_nothing_and_what_stays_torchs_is_named_at_the_end(tmp_path):
    (tmp_path / "some.py").write_text(SOME_STAY)
    done = python("-m", "dpfuse", "run", "--ranks", 2, "some.py", folder=tmp_path, DPFUSE_TRACE=str(tmp_path / "trace"))
    assert (done.returncode, done.stdout) == (0, "dpfuse\ndpfuse\n"), done.stderr
    assert done.stderr.count("UserWarning: Derived derives from torch's DistributedDataParallel") == 1
    replaced, *left = [line for line in done.stderr.splitlines() if line.startswith("dpfuse run: ")]
    assert "Linear is wrapped by dpfuse's" in replaced
    # How many, of which class and line, and what to do: the class derives from torch's, or it was copied.
    assert [re.findall(r"(\d+) models? .*: Derived \(some.py:(\d+)\)", line) for line in left] == [
        [("2", "11")],
        [("1", "12")],
    ]
    assert "Derive it from dpfuse" in left[0]
    assert "Wrap its `module` again" in left[1]
    assert [trace.models[0]["wrapper"] for trace in read_folder(tmp_path / "trace").values()] == ["dpfuse", "dpfuse"]


OWN_CLASS = """
import dpfuse, torch, torch.distributed as dist
dist.init_process_group("gloo")
for kind in (dpfuse.DistributedDataParallel, dpfuse.DataParallel):
    model = kind(torch.nn.Linear(2, 2))
torch.optim.SGD(model.parameters(), lr=0.1).step()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_of_a_program_that_uses_our_class_it_is_said_that_nothing_was_to_be_replaced(tmp_path):
    (tmp_path / "own.py").write_text(OWN_CLASS)
    done = python("-m", "dpfuse", "run", "--ranks", 2, "own.py", folder=tmp_path, warm=True, warm_ranks=True)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("dpfuse run")] == [
        "dpfuse run: Linear and Linear are wrapped by a class of dpfuse already (own.py:5), so there was nothing to "
        "replace there"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["import a_module_that_is_not_there", "import sys; sys.exit(2)"])
def test_a_rank_that_fails_before_it_wraps_is_not_told_that_nothing_was_replaced(ending, tmp_path):
    (tmp_path / "fails.py").write_text(f"import torch\n{ending}\n")
    done = python("-m", "dpfuse", "run", "--ranks", 2, "fails.py", folder=tmp_path)
    assert done.returncode != 0
    assert "replaced nothing" not in done.stderr


TRANSFORMERS_FIRST = """
import transformers
from transformers import Trainer
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(type(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))).__module__.split(".")[0])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_program_that_imports_transformers_first_is_replaced(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "first.py").write_text(TRANSFORMERS_FIRST)
    done = python("-m", "dpfuse", "run", "first.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "dpfuse\n"), done.stderr
    assert REPLACED.findall(done.stderr) == ["Linear"]


NOTHING = "dpfuse run: this program has made no DistributedDataParallel{}, so dpfuse has replaced nothing{}\n"
HINT = "write `dpfuse run --ranks 2` in place of `dpfuse run`"


@pytest.fixture
def messages(monkeypatch):
    """Makes what a process says, as one whose environment has the variables that are given."""

    def make(**variables: str) -> replacement._Messages:
        for name in ("RANK", replacement.OUTER):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return replacement._Messages()

    monkeypatch.setenv(replacement.OUTER, "")  # so that it is given back
    monkeypatch.setattr(replacement, "descendants", lambda processes: set())  # those of the tests
    monkeypatch.delattr("sys.last_value", raising=False)
    return make


@pytest.mark.parametrize(
    ("variables", "where", "hint"),
    [({}, " on this machine", f". If several ranks are to train, {HINT}"), ({"RANK": "0"}, " on rank 0", "")],
)
def test_a_program_that_trains_without_a_wrapper_is_told_so_at_its_end(messages, variables, where, hint, capsys):
    one = messages(**variables)
    one.nothing()
    assert capsys.readouterr().err == ""  # it did not train: perhaps it has called `sys.exit`
    one.after_step(None)
    one.nothing()
    assert capsys.readouterr().err == NOTHING.format(where, hint)


def raised_by(read):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_RANK", raising=False)
        try:
            read()
        except KeyError as error:
            return error


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (raised_by(lambda: os.environ["LOCAL_RANK"]), True),
        (raised_by(lambda: {}["LOCAL_RANK"]), False),  # a table of the program
        (raised_by(lambda: os.environ["NO_SUCH"]), False),
        (ValueError("Error initializing: environment variable RANK expected, but not set"), True),
        (ValueError("mine"), False),
    ],
)
def test_a_program_that_misses_the_variables_of_a_rank_is_told_how_to_start_ranks(
    messages, error, hint, capsys, monkeypatch
):
    monkeypatch.setattr("sys.last_value", error, raising=False)
    messages(RANK="0").nothing()
    assert capsys.readouterr().err == ""
    messages().nothing()
    assert (HINT in capsys.readouterr().err) == hint


def test_nothing_is_said_of_other_ranks_of_programs_that_fail_and_of_inner_processes(messages, capsys, monkeypatch):
    other = messages(RANK="1")
    other.after_step(None)
    other.nothing()
    for rank in ({}, {"RANK": "0"}):
        outer = messages(**rank)
        outer.after_step(None)
        inner = messages(**rank, DPFUSE_STARTUP_RANK=os.environ["DPFUSE_STARTUP_RANK"])
        inner.nothing()
        with monkeypatch.context() as failed:
            failed.setattr("sys.last_value", ImportError(), raising=False)
            outer.nothing()
    assert capsys.readouterr().err == ""
    outer.nothing()
    assert capsys.readouterr().err == NOTHING.format(" on rank 0", "")


@pytest.mark.parametrize("rank", [{}, {"RANK": "0"}])
def test_a_process_says_nothing_where_one_that_it_has_started_may_speak(messages, rank, capsys, monkeypatch):
    outer = messages(**rank)
    outer.after_step(None)
    messages(RANK="1", DPFUSE_STARTUP_RANK=os.environ["DPFUSE_STARTUP_RANK"])  # a rank, such as of a launcher
    outer.nothing()
    outer = messages(**rank)
    outer.after_step(None)
    messages(**rank, DPFUSE_STARTUP_RANK=os.environ["DPFUSE_STARTUP_RANK"]).made(
        SimpleNamespace(process_group=_Group())
    )
    outer.nothing()
    monkeypatch.setattr(replacement, "descendants", lambda processes: {1})
    outer = messages(**rank)
    outer.after_step(None)
    outer.nothing()  # a process that was started earlier would not tell
    assert capsys.readouterr().err == ""


class _Group:
    def rank(self):
        return 1


def test_a_note_is_written_only_into_the_file_that_it_is(messages, tmp_path):
    note = replacement._Note.new()
    (tmp_path / "theirs").write_text("")
    with open(tmp_path / "theirs") as theirs:
        assert note.read() == b""
        os.dup2(theirs.fileno(), int(note.path.rpartition("/")[2]))  # the program has closed all files
        note.write(b"s")
    assert (tmp_path / "theirs").read_text() == ""
    assert note.read() == b""
    replacement._Note("/proc/1234567/fd/3").write(b"s")


SPAWNS = """
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

class Derived(DistributedDataParallel):
    pass

def work(rank, store, kind):
    if kind:
        dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        net = torch.nn.Linear(2, 2)
        {"derived": Derived, "torch's": DistributedDataParallel, "none": lambda net: net}[kind](net)
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        dist.destroy_process_group()

if __name__ == "__main__":
    import sys
    mp.start_processes(work, args=sys.argv[2:4], nprocs=2, start_method=sys.argv[1])
    exec(sys.argv[4])
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_rank_0_of_a_program_that_starts_its_ranks_speaks(method, tmp_path):
    (tmp_path / "spawns.py").write_text(SPAWNS)

    def said(*words: str) -> list[str]:
        done = python("-W", "ignore", "-m", "dpfuse", "run", "spawns.py", method, *words, folder=tmp_path)
        return [line[:40] for line in done.stderr.splitlines(keepends=True) if line.startswith("dpfuse run")]

    assert said(str(tmp_path / "1"), "derived", "") == ["dpfuse run: 1 model of this process is wrapp"[:40]]
    if method != "spawn":
        return
    assert said(str(tmp_path / "2"), "torch's", "") == ["dpfuse run: Linear is wrapped by dpfuse's"[:40]]
    assert said(str(tmp_path / "3"), "none", "") == [NOTHING[:40]]
    assert said(str(tmp_path / "4"), "none", "import not_there") == said(str(tmp_path / "5"), "", "") == []


@pytest.mark.parametrize(
    ("words", "environment", "texts"),
    [
        (["nothing.py"], {}, ["there is no script 'nothing.py'", "Write -m before"]),
        ([str(PROGRAMS)], {}, ["there is no script", "or of a folder with __main__.py"]),
        (["--no_python", "no-such-command"], {}, ["there is no command 'no-such-command'"]),
        (["--ranks", "2", __file__], {"WORLD_SIZE": "4"}, ["--ranks=2", "WORLD_SIZE=4", "remove WORLD_SIZE"]),
    ],
)
def test_a_wrong_command_line_says_what_to_write(words, environment, texts, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["run", *words]) == 1
    said = capsys.readouterr().err
    assert said.startswith("dpfuse run: ")
    assert [text for text in texts if text not in said] == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["run", "--nproc_per_node", "2", "train.py"], "expected --ranks, as in: dpfuse run --ranks 2 train.py"),
        (["run", "-np", "2", "train.py", "--lr", "1"], "expected --ranks, as in: dpfuse run --ranks 2 train.py"),
        (["doctor", "--num-processes=2", "train.py"], "expected --ranks, as in: dpfuse doctor --ranks 2 train.py"),
        (["run", "--rank", "2", "train.py"], "did you mean --ranks?"),
        (["doctor", "--own-rank", "train.py"], "did you mean --own-ranks?"),
        (["env", "--xyz"], "see: dpfuse env --help"),
    ],
)
def test_a_wrong_name_of_a_flag_gets_one_line_with_the_right_one(words, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{words[1]}; {text}" in line


def test_ctrl_c_before_ranks_are_started_is_one_line(monkeypatch, capsys):
    def interrupted(words, **how):
        raise KeyboardInterrupt

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("dpfuse.job.launcher.run_job", interrupted)
    assert main(["run", "--ranks", "2", __file__]) == 130
    assert capsys.readouterr().err == "dpfuse run: interrupted\n"


@pytest.mark.slow
def test_a_program_that_expects_ranks_is_told_how_to_start_them(tmp_path):
    (tmp_path / "expects.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')")
    done = python("-m", "dpfuse", "run", "expects.py", folder=tmp_path)
    assert done.returncode == 1
    assert "environment variable RANK expected" in done.stderr.splitlines()[-2]
    assert done.stderr.splitlines()[-1].startswith("dpfuse run: the program expects to be one of several ranks")
    assert "--ranks 2" in done.stderr.splitlines()[-1]


STEPS = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 1))
if "fails" in sys.argv:
    sys.last_words
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    value = float("nan") if "nan" in sys.argv and dist.get_rank() == 1 else 1.0
    model(torch.full((1, 2), value)).sum().backward()
    print(f"dpfuse run: step {step} on rank {dist.get_rank()}", file=sys.stderr)
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_what_was_replaced_is_said_at_the_first_step_and_not_where_the_program_fails_before(tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)

    def run(*words):
        done = python("-m", "dpfuse", "run", "--ranks", 1, *words, folder=tmp_path)
        return done.returncode, [line[:28] for line in done.stderr.splitlines() if line.startswith("dpfuse run: ")]

    said = ["dpfuse run: step 0 on rank 0", "dpfuse run: Linear is wrapped", "dpfuse run: step 1 on rank 0"]
    assert run("steps.py") == (0, [line[:28] for line in said])
    assert run("steps.py", "fails") == (1, [])


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("warn", 0), ("raise", 1)])
def test_the_check_of_finite_gradients_is_a_flag(how, code, tmp_path):
    (tmp_path / "steps.py").write_text(STEPS)
    done = python("-m", "dpfuse", "run", "--ranks", 2, "--check_finite", how, "steps.py", "nan", folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert "weight" in done.stderr
    assert ("UserWarning: rank 1: " in done.stderr) == (how == "warn")
    assert ("DPFuseError" in done.stderr) == (how == "raise")


def test_other_ranks_leave_to_rank_0_what_every_rank_sees_unless_the_program_wants_an_error(messages):
    drift, rest = WeightsWarning("DPF-W01: rank 1: ...", "DPF-W01"), LoopWarning("DPF-L01: rank 1: ...", "DPF-L01")
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        one = messages(RANK="1")
        one.made(SimpleNamespace(process_group=_Group()))
        warnings.warn(drift, stacklevel=1)
        one.after_step(None)
        for warning in (drift, rest):
            warnings.warn(warning, stacklevel=1)
        assert [str(each.message)[:7] for each in seen] == ["DPF-W01", "DPF-L01"]
        warnings.simplefilter("error")
        with pytest.raises(WeightsWarning):
            warnings.warn(drift, stacklevel=1)


RESTS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    optimizer.zero_grad()
    for micro in range(2):
        loss = model(torch.randn(4, 8)).square().mean()
        model.require_backward_grad_sync = micro == 1
        loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([PROGRAMS / "toy.py", "--wrong", "drift", "--steps", 100], "WeightsWarning: DPF-W01"),
        (["rests.py"], "LoopWarning: DPF-L01"),
    ],
)
def test_a_warning_of_all_ranks_is_said_once_for_the_job(words, said, tmp_path):
    (tmp_path / "rests.py").write_text(RESTS)
    done = python("-m", "dpfuse", "run", "--ranks", 2, *words, folder=tmp_path)
    assert done.returncode == 0
    assert done.stderr.count(f"{said}: rank 0: ") == done.stderr.count(f"{said}: rank ") == 1


WITH_A_WORKER = """
import multiprocessing, time
multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True).start()
print("ready\\n", end="", flush=True)
time.sleep(1000)
"""
DROPPED = """
import time
class Ends:
    def __del__(self):
        print("ready\\n", end="", flush=True)
        time.sleep(1000)  # Python drops an exception that is raised here
Ends()
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("waits", ["", WITH_A_WORKER, DROPPED], ids=["in a training", "with a worker", "dropped"])
def test_ctrl_c_ends_ranks_with_one_line(waits, tmp_path):
    (tmp_path / "waits.py").write_text(waits)
    program = tmp_path / "waits.py" if waits else PROGRAMS / "toy.py"
    process = start("-m", "dpfuse", "run", "--ranks", 2, program, "--steps", 10**9)
    if waits:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    else:
        assert "is wrapped" in process.stderr.readline()
    members, began = family(process.pid), time.monotonic()
    assert len(members) >= 3
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=patience(60))
    assert time.monotonic() - began < patience(2)
    assert (process.returncode, told) == (130, "dpfuse.launch: got SIGINT; every rank was ended\n")
    assert all_gone(members, within=2)


def test_python_must_read_its_variables(tmp_path):
    command = "import sys; from dpfuse.commands.command_line import main; sys.exit(main(['run', sys.argv[1]]))"
    code = f"import sys; sys.path[:0] = {clean_environment()['PYTHONPATH'].split(os.pathsep)}; {command}"
    done = python("-E", "-c", code, __file__)
    assert done.returncode == 1
    assert "Python was started with -E, -I or -S" in done.stderr


def test_the_folder_is_added_once():
    once = startup_variables("a.module", {"PYTHONPATH": os.pathsep.join(["/x", "/y"])})
    again = startup_variables("a.module", once)
    assert once == again
    assert once["PYTHONPATH"].split(os.pathsep) == [FOLDER, "/x", "/y"]
    assert startup_variables("a.module", {})["PYTHONPATH"] == FOLDER


def test_empty_entries_of_the_path_are_kept(tmp_path):
    for value in (":/lib", "/lib:", "/a::/b"):
        once = startup_variables("a.module", {"PYTHONPATH": value})
        assert once["PYTHONPATH"] == f"{FOLDER}:{value}"
        assert startup_variables("a.module", once) == once
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "program.py").write_text("import mine, sys; print(sys.path[1:])")
    path = f":{clean_environment()['PYTHONPATH']}"
    plain = python("below/program.py", folder=tmp_path, PYTHONPATH=path)
    ours = python("-m", "dpfuse", "run", "below/program.py", folder=tmp_path, PYTHONPATH=path)
    assert (ours.returncode, ours.stdout) == (0, plain.stdout), ours.stderr


def test_flags_of_python_are_kept():
    assert _interpreter_flags(["python", "-u", "-Werror", "-W", "error", "-m", "dpfuse", "run", "-m", "x"]) == [
        "-u",
        "-Werror",
        "-W",
        "error",
    ]
    assert _interpreter_flags(["python", "-X", "dev", "-c", "main()"]) == ["-X", "dev"]
    assert _interpreter_flags(["python", "-um", "dpfuse", "run", "-O"]) == ["-u"]
    assert _interpreter_flags(["python", "-mdpfuse", "run", "-u"]) == []
    assert _interpreter_flags(["python", "-OWerror", "-bX", "dev", "dpfuse", "-u"]) == ["-OWerror", "-bX", "dev"]
    words = ["--check-hash-based-pycs", "never", "-m"]
    assert _interpreter_flags(["python", *words, "dpfuse"]) == words[:2]
