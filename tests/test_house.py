"""The house keeps its shape: layers, import roots, packaging, documents."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("tiers", "transport", "engine_connector", "kernels")
BRAINS = (
    "index",
    "placements",
    "counters",
    "inventory",
    "usage",
    "reuse_curve",
    "live_curve",
    "removed_keys",
    "meters",
    "health",
    "spill",
    "borrowing",
    "replication",
    "budget",
    "pins",
    "inspection",
    "labels",
    "leases",
    "eviction",
    "admission",
    "costs",
    "calibration",
    "tier_speed",
    "planner",
    "plan_log",
    "request_traces",
    "advisor",
    "presence",
    "slab",
    "store_stats",
    "store",
    "directory",
)

# Level of every module prefix, longest prefix first; an import may only go to the same prefix or to a lower level.
LEVELS = {
    "kvstore.core": 0,
    "kvstore.proto": 0,
    "kvstore.tiers": 1,
    "kvstore.transport": 1,
    "kvstore.kernels": 1,
    **{f"kvstore.{name}": 2 for name in (*BRAINS, "mover", "recovery", "metrics")},
    "kvstore.engine_connector.engine": 4,
    "kvstore.engine_connector": 4,
    "kvstore.cli": 5,
    "kvstore.demo": 5,
    "kvstore.route": 5,
}
SERVICE_LEVEL = 3  # every other module directly in kvstore: server, client, sidecar, config, ...
PURE = {"asyncio", "socket", "os", "time", "torch", "threading", "selectors", "subprocess"}


def sources() -> Iterator[tuple[str, Path]]:
    """(dotted module name, file) of everything importable."""
    for folder in ("kvstore", *(f"kvstore/{name}" for name in LINKED)):
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if "_pb2" not in path.name:
                dotted = ".".join(relative.with_suffix("").parts)
                yield dotted.removesuffix(".__init__"), path


MODULES = dict(sources())


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def level(module: str) -> int:
    for prefix in sorted(LEVELS, key=len, reverse=True):
        if module == prefix or module.startswith(prefix + "."):
            return LEVELS[prefix]
    return SERVICE_LEVEL


def family(module: str) -> str:
    """Modules that may import one another on the same level."""
    for prefix in sorted(LEVELS, key=len, reverse=True):
        if module == prefix or module.startswith(prefix + "."):
            return prefix
    return "service"


def internal_edges() -> Iterator[tuple[str, str]]:
    for module, path in MODULES.items():
        for target in imports(path):
            if target in MODULES and target not in {module, "kvstore"}:
                yield module, target


def test_imports_point_down() -> None:
    wrong = [
        f"{source} imports {target}"
        for source, target in internal_edges()
        if level(target) > level(source)
        or (level(target) == level(source) == 1 and family(source) != family(target))  # tiers, transport, kernels
    ]

    assert wrong == []


def test_no_import_circle() -> None:
    edges: dict[str, set[str]] = {}
    for source, target in internal_edges():
        edges.setdefault(source, set()).add(target)
    done: set[str] = set()

    def visit(module: str, route: tuple[str, ...]) -> None:
        assert module not in route, " -> ".join((*route, module))
        if module not in done:
            for target in edges.get(module, ()):
                visit(target, (*route, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_brains_and_core_do_no_io() -> None:
    """Brains decide; time, sockets, files and tensors reach them only as arguments."""
    for module, path in MODULES.items():
        if module.split(".")[1:2] and (module.split(".")[1] in BRAINS or module.startswith("kvstore.core.")):
            banned = {name.split(".")[0] for name in imports(path)} & PURE
            assert banned <= ({"time"} if module == "kvstore.core.clock" else set()), f"{module} imports {banned}"


def test_the_engine_knows_only_the_protocol() -> None:
    for module, path in MODULES.items():
        if module.startswith("kvstore.engine_connector.engine"):
            for target in imports(path):
                if target.startswith("kvstore.") and target in MODULES:
                    allowed = ("kvstore.engine_connector.engine", "kvstore.engine_connector.protocol", "kvstore.core")
                    extra = ("kvstore.kernels", "kvstore.engine_connector.fingerprint")
                    assert target.startswith((*allowed, *extra)), f"{module} imports {target}"


@pytest.mark.parametrize("name", LINKED)
def test_top_level_folders_are_linked_into_the_package(name: str) -> None:
    link = ROOT / "kvstore" / name

    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"


def test_kernels_is_no_top_level_package() -> None:
    """An `__init__.py` there would let `import kernels` shadow an unrelated package of that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_packaging_finds_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert project["tool"]["setuptools"]["packages"]["find"] == {"include": ["kvstore*"], "namespaces": True}
    assert project["project"]["scripts"] == {"kvstore": "kvstore.cli.main:main"}
    assert project["tool"]["coverage"]["run"]["source"] == ["kvstore"]


def tracked_text() -> Iterator[tuple[Path, str]]:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    if names.returncode:
        pytest.skip("not a git checkout")
    for name in names.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and not path.is_symlink() and "_pb2" not in name:
            yield path, path.read_text(errors="replace")


def test_nothing_ties_the_repo_to_one_machine() -> None:
    """No absolute path of somebody's machine and no package registry's host name in any tracked file."""
    telltale = re.compile(r"(?<!\w)/(work|root)" + r"/|pypi" + r"\.org|registry\.npm" + r"js|deb\.deb" + "ian")
    wrong = [f"{path.name}: {hit.group()}" for path, text in tracked_text() if (hit := telltale.search(text))]

    assert wrong == []


def test_every_make_target_in_the_documents_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    for name in ("README.md", "ARCHITECTURE.md", "tests/README.md"):
        named = set(re.findall(r"`make ([a-z-]+)", (ROOT / name).read_text()))
        assert named <= targets, f"{name} names {named - targets}"


def test_every_command_is_in_the_readme() -> None:
    from kvstore.cli.main import COMMANDS

    readme = (ROOT / "README.md").read_text()
    missing = [name for name in COMMANDS if f"kvstore {name}" not in readme]

    assert missing == []


def test_every_relative_link_in_the_documents_leads_somewhere() -> None:
    for path, text in tracked_text():
        if path.suffix == ".md":
            for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
