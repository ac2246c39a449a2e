"""Which folders are looked at, and which files have changed."""

from __future__ import annotations

from dpfuse.commands.doctor import changed_files
from dpfuse.commands.doctor.changed_files import folders_of, snapshot


def test_new_removed_and_changed_files_are_found_and_the_doctors_own_are_not(tmp_path):
    own = tmp_path / "report"
    for name in ("same", "changed", "removed"):
        (tmp_path / name).write_text("one")
    own.mkdir()
    (tmp_path / "__pycache__").mkdir()
    before = snapshot([str(tmp_path)], own)
    (tmp_path / "changed").write_text("two, longer")
    (tmp_path / "removed").unlink()
    (tmp_path / "new").write_text("")
    (own / "report.json").write_text("")
    (tmp_path / "__pycache__" / "x.pyc").write_text("")
    after = snapshot([str(tmp_path)], own)
    assert after.changed_since(before) == [str(tmp_path / name) for name in ("changed", "new", "removed")]
    assert after.complete


def test_a_look_ends_at_a_number_of_files_and_says_so(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / name).write_text("")
    monkeypatch.setattr(changed_files, "MOST", 2)
    found = snapshot([str(tmp_path)], tmp_path / "own")
    assert (len(found.files), found.complete) == (2, False)


def test_folders_in_arguments_are_looked_at_once(tmp_path, monkeypatch):
    (tmp_path / "work" / "inside").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    words = ["--lr", "0.1", f"--out={tmp_path}/runs/new", "inside/config.yaml", str(tmp_path / "runs")]
    words += ['{"a/b": "' + "x" * 5000 + '"}', "~nobody-of-that-name/x", ""]
    assert folders_of(words, tmp_path / "own") == [str(tmp_path / "runs"), str(tmp_path / "work")]
