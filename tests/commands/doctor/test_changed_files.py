"""Which folders are looked at, and which files have changed."""

from __future__ import annotations

import os

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
    assert folders_of([*words, "/"], tmp_path / "own") == [str(tmp_path / "work"), str(tmp_path / "runs")]


def test_a_folder_that_the_program_may_make_is_looked_at(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    found = folders_of(["../made/later/a", "made/here/too"], tmp_path / "own")
    assert found == [str(tmp_path / "work"), str(tmp_path / "made")]
    before = snapshot(found, tmp_path / "own")
    (tmp_path / "made" / "later").mkdir(parents=True)
    (tmp_path / "made" / "later" / "a").write_text("")
    assert snapshot(found, tmp_path / "own").changed_since(before) == [str(tmp_path / "made" / "later" / "a")]


def test_links_are_followed_in_arguments_and_in_the_folders_themselves(tmp_path, monkeypatch):
    for name in ("work", "scratch/me", "far", "deep"):
        (tmp_path / name).mkdir(parents=True)
    work = tmp_path / "work"
    (work / "runs").symlink_to(tmp_path / "scratch")  # a folder
    (work / "last.pt").symlink_to(tmp_path / "deep" / "last.pt")  # a file that is there later
    (tmp_path / "link").symlink_to(work)
    monkeypatch.chdir(tmp_path / "link")
    found = folders_of(["--out", "runs/me/new", f"--far={tmp_path}/link/../far"], tmp_path / "own")
    assert found == [str(work), str(tmp_path / "scratch" / "me"), str(tmp_path / "far"), str(tmp_path / "scratch")]
    before = snapshot(found, tmp_path / "own")
    written = [tmp_path / name for name in ("deep/last.pt", "far/a", "scratch/b", "scratch/me/c")]
    for path in written:
        path.write_text("one")
    assert snapshot(found, tmp_path / "own").changed_since(before) == [*map(str, written)]


def test_each_folder_has_its_own_limit_of_files(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "work" / "last.pt").write_text("")
    for name in "abc":
        (tmp_path / "data" / name).write_text("")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(changed_files, "MOST", 2)
    found = snapshot(folders_of([str(tmp_path / "data")], tmp_path / "own"), tmp_path / "own")
    assert str(tmp_path / "work" / "last.pt") in found.files
    assert not found.complete


def test_the_file_into_which_a_shell_sends_what_the_doctor_prints_is_left_out(tmp_path):
    (tmp_path / "saved.pt").write_text("")
    before = os.dup(1)
    try:
        with open(tmp_path / "log.txt", "w") as log:
            os.dup2(log.fileno(), 1)
        found = snapshot([str(tmp_path)], tmp_path / "own")
    finally:
        os.dup2(before, 1)
        os.close(before)
    assert [*found.files] == [str(tmp_path / "saved.pt")]
