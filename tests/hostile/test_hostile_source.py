"""What the package never does, read off its source: run text, load what can run code, ask a shell, compare secrets by ==."""

import ast
from pathlib import Path

import pytest

import headway

ROOT = Path(headway.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "shelve",
    "marshal",
    "multiprocessing",
    "yaml",
    "joblib",
    "code",
    "pty",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    ("os", "system"),
    ("os", "popen"),
    ("os", "execv"),
    ("os", "spawnv"),
    ("subprocess", "getoutput"),
    ("subprocess", "getstatusoutput"),
    ("asyncio", "create_subprocess_shell"),
    ("torch", "save"),
    ("tempfile", "mktemp"),
    ("np", "save"),
}
# file: what is allowed there, and why
ALLOWED = {
    ("entries.py", "importlib.import_module"),  # the module that the user's own config names
}


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def keyword(node, name):
    return next((item.value for item in node.keywords if item.arg == name), None)


@pytest.fixture(scope="module")
def trees():
    assert len(FILES) > 150
    return {path: ast.parse(path.read_bytes()) for path in FILES}


def test_no_module_that_runs_what_it_loads_is_imported(trees):
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & FORBIDDEN_MODULES, path


def test_no_text_is_run_and_no_shell_is_asked(trees):
    for path, tree in trees.items():
        for node, called in calls(tree):
            assert called not in FORBIDDEN_CALLS, f"{path}:{node.lineno}"
            assert tuple(called.rsplit(".", 1)) not in FORBIDDEN_ATTRIBUTES, f"{path}:{node.lineno}"
            shell = keyword(node, "shell")
            assert shell is None or (isinstance(shell, ast.Constant) and shell.value is False), f"{path}:{node.lineno}"
            if called == "importlib.import_module":
                assert (path.relative_to(ROOT).as_posix(), called) in ALLOWED, f"{path}:{node.lineno}"


def test_arrays_and_checkpoints_are_loaded_as_data_alone(trees):
    for path, tree in trees.items():
        for node, called in calls(tree):
            if called == "torch.load":
                only = keyword(node, "weights_only")
                assert isinstance(only, ast.Constant), f"{path}:{node.lineno}"
                assert only.value is True, f"{path}:{node.lineno}"
            if called in {"np.load", "numpy.load"}:
                pickles = keyword(node, "allow_pickle")
                assert isinstance(pickles, ast.Constant), f"{path}:{node.lineno}: np.load may unpickle"
                assert pickles.value is False, f"{path}:{node.lineno}: np.load may unpickle"
            if called.endswith("from_pretrained"):
                trust = keyword(node, "trust_remote_code")
                assert trust is None or (isinstance(trust, ast.Constant) and trust.value is False), f"{path}:{node.lineno}"


def test_tokens_and_keys_are_compared_in_constant_time(trees):
    comparing = {
        path.relative_to(ROOT).as_posix() for path, tree in trees.items() for _, called in calls(tree) if called == "hmac.compare_digest"
    }
    assert {"adapters/ingest/server.py", "embedded/engine/server.py"} <= comparing
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and any(isinstance(op, (ast.Eq, ast.NotEq)) for op in node.ops):
                words = {name.id.lower() for name in ast.walk(node) if isinstance(name, ast.Name)}
                words |= {name.attr.lower() for name in ast.walk(node) if isinstance(name, ast.Attribute)}
                assert not words & {"_token", "api_key", "secret", "_authorization", "authorization"}, f"{path}:{node.lineno}"


def test_nothing_listens_beyond_loopback_unless_told(trees):
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in {"0.0.0.0", "::"}, f"{path}:{node.lineno}"
