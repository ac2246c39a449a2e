"""The files of checkpoints: whole or absent, whatever happens while they are written."""

from __future__ import annotations

import json
import os
import zipfile

import pytest
import torch

from dpfuse.checkpoint import folder
from dpfuse.checkpoint.folder import DamagedFileError, read_newest, read_whole, step_path, write_step
from tests.distributed.processes import SCRIPTS, run


def killed(how, times):
    done = run(SCRIPTS / "kill_while_saving.py", how, times, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_kill_while_saving_loses_a_checkpoint():
    counted = killed("dpfuse", 10)
    assert counted["lost"] == 0
    assert counted["half"] > 0  # some did come in the middle of a file
    assert counted["saved"] > 0


def test_the_kills_do_harm_where_one_file_is_written_over():
    assert killed("torch.save", 10)["lost"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_not_one_of_many_kills_loses_a_checkpoint():
    counted = killed("dpfuse", 200)
    assert counted["lost"] == 0
    assert counted["half"] >= 20


def test_the_content_is_on_the_disk_before_the_name_is_and_the_name_before_an_older_one_goes(tmp_path, monkeypatch):
    write_step(tmp_path, 1, {"a": torch.ones(3)}, keep=1)
    done = []

    def recorded(name):
        call = getattr(os, name)

        def record(*arguments):
            target = arguments[-1]
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
            done.append((name, os.path.relpath(path, tmp_path)))
            return call(*arguments)

        monkeypatch.setattr(os, name, record)

    for name in ("fsync", "replace", "unlink"):
        recorded(name)
    write_step(tmp_path, 2, {"a": torch.ones(3)}, keep=1)
    new, old = "step-0000000002.pt", "step-0000000001.pt"
    assert done == [("fsync", f"{new}.part"), ("replace", new), ("fsync", "."), ("unlink", old)]


def test_a_failure_while_writing_leaves_the_files_before(tmp_path, monkeypatch):
    path = write_step(tmp_path, 1, {"a": 1}, keep=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_step(tmp_path, 2, {"a": 2}, keep=1)
    assert os.listdir(tmp_path) == [path.name]
    assert read_newest(tmp_path)[0] == path


def test_what_a_killed_process_left_half_written_goes_with_the_next_file(tmp_path):
    (tmp_path / "step-0000000007.pt.part").write_bytes(b"half")
    (tmp_path / "notes.part").write_text("mine")
    write_step(tmp_path, 8, {"a": 1}, keep=None)
    assert sorted(os.listdir(tmp_path)) == ["notes.part", "step-0000000008.pt"]


def test_other_files_are_left_alone(tmp_path):
    names = ["step-1.pt", "step-0000000001.pt.bak", "best.pt"]
    for name in names:
        (tmp_path / name).touch()
    for step in range(4):
        write_step(tmp_path, step, {"a": step}, keep=2)
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "step-0000000002.pt", "step-0000000003.pt"])


def test_the_same_step_may_be_saved_again_and_a_later_one_is_refused(tmp_path):
    write_step(tmp_path, 5, {"a": 1}, keep=3)
    path = write_step(tmp_path, 5, {"a": 2}, keep=3)
    assert read_whole(path)["a"] == 2
    with pytest.raises(ValueError, match=r"has step-0000000005.pt, later than step 4 .* Remove the later files, or"):
        write_step(tmp_path, 4, {"a": 3}, keep=3)


def test_steps_of_more_than_ten_digits_still_sort(tmp_path):
    for step in (9_999_999_999, 10_000_000_000):
        write_step(tmp_path, step, {"a": step}, keep=None)
    assert read_newest(tmp_path)[1]["a"] == 10_000_000_000


@pytest.mark.slow
def test_every_changed_bit_and_every_cut_is_noticed(tmp_path):
    path = write_step(tmp_path, 3, {"weight": torch.arange(8.0), "name": "x" * 20}, keep=1)
    good = path.read_bytes()
    damaged = [good[:spot] + bytes([good[spot] ^ 1 << spot % 8]) + good[spot + 1 :] for spot in range(len(good))]
    damaged += [good[:length] for length in range(len(good))] + [good + b"\0", b"\0" * len(good)]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(DamagedFileError, match=f"{path} is damaged: "):
            read_whole(path)
    path.write_bytes(good)
    assert read_whole(path)["name"] == "x" * 20


def test_torch_alone_would_take_changed_numbers_for_good_ones(tmp_path):
    """Shows that the checksum is needed."""
    weight = torch.arange(8.0)
    path = write_step(tmp_path, 3, {"weight": weight}, keep=1)
    data = bytearray(path.read_bytes())
    data[data.index(weight.numpy().tobytes()) + 6] ^= 1
    path.write_bytes(data)
    assert not torch.equal(torch.load(path, weights_only=True)["weight"], weight)
    with pytest.raises(DamagedFileError, match="its content does not match its checksum"):
        read_whole(path)


def test_a_file_is_one_of_torchs(tmp_path):
    path = write_step(tmp_path, 1, {"weight": torch.arange(5.0)}, keep=1)
    for how in ({}, {"mmap": True}):
        assert torch.load(path, weights_only=True, **how)["weight"].tolist() == [0, 1, 2, 3, 4]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


class Planted:
    """Runs a program when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_file_that_would_run_code_is_not_loaded(tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    monkeypatch.setattr(folder, "_check_loadable", lambda *_: None)
    path = write_step(tmp_path, 1, {"step": 1, "model": Planted(marker)}, keep=1)
    with pytest.raises(ValueError, match=r"is not a checkpoint of dpfuse.save_checkpoint: (.|\n)*mkdir"):
        read_newest(tmp_path)
    assert path.exists()
    assert not marker.exists()


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    with pytest.raises(TypeError, match=r"^extra: has .*mkdir, which weights_only=True does not load"):
        write_step(tmp_path, 1, {"step": 1, "extra": Planted("x")}, keep=1)
    assert os.listdir(tmp_path) == []


def test_another_file_is_no_checkpoint(tmp_path, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setattr(folder, "FORMAT", "another")
        path = write_step(tmp_path, 1, {"model": 1}, keep=1)
    with pytest.raises(ValueError, match=r"is not a checkpoint of dpfuse\.save_checkpoint; load it with torch\.load"):
        read_newest(tmp_path)
    torch.save({"state_dict": 1}, path)
    with pytest.raises(
        ValueError, match=r"was not written by dpfuse\.save_checkpoint.* Read it with torch\.load"
    ) as told:
        read_whole(path)
    assert not isinstance(told.value, DamagedFileError)  # in whose place an earlier file is loaded


def test_a_later_format_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "VERSION", 2)
    path = write_step(tmp_path, 1, {}, keep=1)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="is of format 2, expected 1: another version of dpfuse wrote it"):
        read_whole(path)


def test_a_file_that_cannot_be_read_is_an_error_not_a_reason_to_go_back(tmp_path):
    write_step(tmp_path, 1, {}, keep=None)
    step_path(tmp_path, 2).mkdir()
    with pytest.raises(IsADirectoryError):
        read_newest(tmp_path)


def test_no_folder_has_nothing(tmp_path):
    assert read_newest(tmp_path / "none") is None
    assert read_newest(tmp_path) is None
