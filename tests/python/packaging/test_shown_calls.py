"""What pages and examples call exists, with the arguments that they pass; README's script runs."""

from __future__ import annotations

import ast
import os
import re
import textwrap
from pathlib import Path

import numpy as np
import prefork
import pytest

import nostall

ROOT = Path(__file__).parents[3]
# Run with torch: names of nostall.torch are shown too. Arguments: the root of the checkout.
CALLS = '''
import ast, importlib, inspect, re, sys, textwrap, typing
from pathlib import Path
import nostall

root = Path(sys.argv[1])
pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
block = re.compile(r"```python\\n(.*?)```", re.S)
shown = [(p, textwrap.dedent(b)) for p in pages for b in block.findall(p.read_text())]
shown += [(p, p.read_text()) for p in sorted((root / "examples").glob("*.py"))]
assert len(shown) > 130
shown += [(root / "given", text) for text in sys.argv[2:]]

def chain(node):
    """The dotted name of an expression; None for others."""
    if isinstance(node, ast.Name):
        return [node.id]
    before = chain(node.value) if isinstance(node, ast.Attribute) else None
    return before and [*before, node.attr]

def resolve(names, imported):
    """The object that a dotted name means; None if it is none of nostall's."""
    if names is None or names[0] not in imported:
        return None
    found = imported[names[0]]
    for name in names[1:]:
        try:
            found = getattr(found, name)
        except AttributeError:
            if not inspect.ismodule(found):
                raise
            found = importlib.import_module(f"{found.__name__}.{name}")
        if not (inspect.ismodule(found) or inspect.isclass(found)):
            break  # of what a call gives nothing is known
    return found

def signature_of(call):
    """What a callable takes; None if it says nothing of that."""
    try:
        found = inspect.signature(call)
    except ValueError:  # of nanobind's methods
        return None
    parameters = []
    for p in found.parameters.values():
        target = call.__init__ if inspect.isclass(call) else call
        if p.annotation in ("Never", typing.Never):
            continue  # taken for its error's sake alone
        if p.kind is p.VAR_KEYWORD:
            hint = typing.get_type_hints(target).get(p.name)
            if typing.get_origin(hint) is typing.Unpack:
                options = typing.get_type_hints(typing.get_args(hint)[0])
                parameters += [
                    inspect.Parameter(name, p.KEYWORD_ONLY, default=None)
                    for name in options
                    if name not in found.parameters
                ]
                continue
        parameters.append(p)
    return found.replace(parameters=parameters)

def fault_of(node, signature):
    """Why a call of the page does not go with a signature; None if it does."""
    starred = any(isinstance(a, ast.Starred) for a in node.args)
    given = [a for a in node.args if not isinstance(a, ast.Starred)]
    named = {k.arg: k for k in node.keywords if k.arg is not None}
    elided = any(isinstance(a, ast.Constant) and a.value is ... for a in given)
    whole = not (starred or elided or len(named) < len(node.keywords))
    try:
        (signature.bind if whole else signature.bind_partial)(*given, **named)
    except TypeError as error:
        return str(error)

faults, calls = [], 0
for page, text in shown:
    tree = ast.parse(text)
    imported = {"nostall": nostall, "t": nostall.transforms}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("nostall.") and alias.asname:
                    imported[alias.asname] = importlib.import_module(alias.name)
                elif alias.asname == "t" or alias.name == "t":
                    imported.pop("t", None)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nostall":
            for alias in node.names:
                home = importlib.import_module(node.module)
                imported[alias.asname or alias.name] = resolve(["home", alias.name], {"home": home})
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.For):  # a name of the page's own
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in {n.id for x in targets for n in ast.walk(x) if isinstance(n, ast.Name)}:
                imported.pop(name, None)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        names = chain(node.func)
        try:
            call = resolve(names, imported)
            if call is None or not callable(call):
                continue
            signature = signature_of(call)
        except (AttributeError, ImportError) as error:
            faults.append(f"{page.relative_to(root)}: {'.'.join(names)}: {error}")
            continue
        calls += 1
        if signature is not None and (why := fault_of(node, signature)):
            faults.append(f"{page.relative_to(root)}: {ast.unparse(node)}: {why}")
assert calls > 200, calls
print("\\n".join(faults))
'''


def test_shown_calls_exist_with_their_arguments() -> None:
    """And those of no page that cannot be made are found."""
    wrong = [
        "Concat(a, b)",  # takes them for its error alone
        "ImageFolder(root, 'index')",
        "ImageFolder()",
        "ImageFolder(root, indices=True)",
        "DataLoader(source, batch_size=4, epoch=3)",
        "Subset(source, *numbers, part=2)",
    ]
    texts = [f"import nostall\nnostall.{call}\n" for call in [*wrong, "Concat([a, b])"]]
    keras = {"KERAS_BACKEND": "torch"}  # a plug-in is for that one
    command = ["-c", CALLS, str(ROOT), *texts]
    run = prefork.run(command, torch=True, env=os.environ | keras, timeout=800)
    assert run.returncode == 0, run.stderr
    found = run.stdout.splitlines()
    assert len(found) == len(wrong), run.stdout
    for call, line in zip(wrong, found, strict=True):
        assert line.startswith(f"given: nostall.{call}: "), line


def test_the_reference_has_no_arguments_that_only_raise() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    assert "`Concat(sources, *, offset_labels=False)`" in page and "*more" not in page


def scripts_of_readme() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.long
def test_the_first_script_of_the_readme_runs_on_the_images_that_it_makes(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (images,) = re.findall(r"^python -c '(.*?)'$", readme, re.S | re.M)
    made = prefork.run(["-c", images], cwd=tmp_path, timeout=800)
    assert made.returncode == 0, made.stderr
    script, *_ = scripts_of_readme()
    assert len(script.splitlines()) <= 10
    run = prefork.run(["-c", script, "pictures"], torch=True, cwd=tmp_path, timeout=800)
    assert run.returncode == 0, run.stderr
    # As README shows it, but that torch is here; the other lines have times.
    shape, kind, *_, bound = run.stdout.splitlines()
    for shown, there in (("40, 3, 224, 224", shape), ("float32", kind), ("lower bound", bound)):
        assert shown in there and shown in readme


def test_the_second_script_of_the_readme_runs(image_folder: Path, tmp_path: Path) -> None:
    _, script, *_ = scripts_of_readme()
    data, epochs = '"/data/train"', "epochs=90"
    assert data in script and epochs in script
    script = script.replace(data, repr(str(image_folder))).replace(epochs, "epochs=2")
    run = prefork.run(["-c", script], torch=True, cwd=tmp_path, timeout=800)
    assert run.returncode == 0, run.stderr
    assert "stalled" in run.stdout


def blocks(text: str) -> list[str]:
    return [textwrap.dedent(b) for b in re.findall(r"```python\n(.*?)```", text, re.S)]


def exported(module: Path) -> set[str]:
    """What a package exports; its source is read, for importing it takes seconds."""
    lists = re.findall(r"__all__ \+?= \[(.*?)\]", module.read_text(), re.S)
    return set(re.findall(r'"(\w+)"', "".join(lists)))


def bound(tree: ast.AST) -> set[str]:
    """The names that a text imports, defines or assigns."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def test_pages_import_the_names_of_ours_that_they_use_bare() -> None:
    plugins = (
        f"plugins/{name}" for name in ("accelerate", "hugging_face", "keras", "torch_loader")
    )
    files = ("torch/__init__", *plugins)
    ours = set().union(*(exported(ROOT / f"python/nostall/{file}.py") for file in files))
    pages = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
    assert {"FromLoader", "copy_into"} <= ours
    for page in pages:
        trees = [ast.parse(block) for block in blocks(page.read_text())]
        names = {n.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)}
        missing = names & ours - set().union(*map(bound, trees))
        assert not missing, (page.name, missing)


def test_pages_import_the_backend_that_they_name() -> None:
    """Only torch 2.15 finds it without that."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]:
        for block in blocks(page.read_text()):
            if 'init_process_group("nostall")' in block:
                assert re.search(r"^import nostall\.torch\b", block, re.M), page.name
        for row in re.findall(r"^\|.*\|$", page.read_text(), re.M):
            if 'init_process_group("nostall")' in row:
                assert "`import nostall.torch`" in row, row


def test_a_job_begins_where_the_guide_says() -> None:
    """In the middle of an epoch that was trained elsewhere, and at the first batch of one."""
    guide = (ROOT / "docs" / "guide" / "getting-started.md").read_text()
    section = guide.partition("## A job that is running already")[2].partition("\n## ")[0]
    (inside,) = re.findall(r"^loader\.load_state_dict.*$", section, re.M)
    (at_start,) = re.findall(r"^loader\.set_epoch.*$", section, re.M)
    source = nostall.Arrays({"x": np.arange(2403)})
    for line, first in ((inside, 1200), (at_start, 0)):
        with nostall.DataLoader(source, 2, epochs=32, seed=5, tiers=[], output="numpy") as loader:
            whole = loader.plan.rank_epoch(30, 0)[0].tolist()
            exec(line, {"loader": loader})
            assert next(iter(loader))["x"].tolist() == whole[2 * first : 2 * first + 2]


# Arguments: a folder, the block of the guide.
ORDER = """
import sys, nostall.torch, torch
dataset = nostall.ImageFolder(sys.argv[1])
sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0, seed=0)
with nostall.DataLoader(dataset, 64, epochs=90, seed=0, tiers=[]) as loader:
    loader.set_epoch(3)
    exec(sys.argv[2])
    _, labels = next(iter(loader))
    assert labels.tolist() == dataset.labels[next(iter(order))].tolist()
"""


def test_the_order_is_checked_as_the_guide_says(image_folder: Path) -> None:
    """By torch's sampler, and by the loader's first batch."""
    guide = (ROOT / "docs" / "guide" / "getting-started.md").read_text()
    (block,) = (block for block in blocks(guide) if "BatchSampler(" in block)
    run = prefork.run(["-c", ORDER, str(image_folder), block], torch=True, timeout=800)
    assert run.returncode == 0, run.stderr
    assert len(re.findall(r"'/[^']+'", run.stdout)) > 30, run.stdout


def test_shown_samplers_count_their_epochs() -> None:
    shown = [
        block
        for page in sorted((ROOT / "docs" / "guide").glob("*.md"))
        for block in blocks(page.read_text())
        if "BatchSampler(" in block
    ]
    assert len(shown) > 1
    assert [block for block in shown if ".set_epoch(" not in block] == []
