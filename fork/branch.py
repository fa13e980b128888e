"""`fork branch DIR`: the series as a git history, upstream below and one commit per topic.

Author and date are fixed and blobs come from the wheel, so the same inputs give the same hashes on every machine,
and two people can compare branches by one line.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from fork import edits
from fork.base import Base
from fork.errors import GitFailed, NotOurTree, TargetGone
from fork.repo import Repo
from fork.series import collision
from fork.topics import Topic
from fork.upstream import Upstream

BRANCH = "ampere"
_IDENTITY = "vllm-ampere <vllm-ampere@localhost> 1767225600 +0000"


def write(repo: Repo, upstream: Upstream, topics: list[Topic], base: Base, folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise NotOurTree(f"{folder} is not empty; name an empty or new folder")
    stream = b"".join(_commits(repo, upstream, topics, base))
    folder.mkdir(parents=True, exist_ok=True)
    _git(folder, "init", "--quiet", f"--initial-branch={BRANCH}", "--template=")
    _git(folder, "fast-import", "--quiet", stdin=stream)
    _git(folder, "reset", "--quiet", "--hard", BRANCH)


def _commits(repo: Repo, upstream: Upstream, topics: list[Topic], base: Base) -> list[bytes]:
    tree = {path: base.read(path) or b"" for path in base.python_files()}
    message = f"vLLM {upstream.version}: Python files\n\nFrom {base.name}; extensions, configs and headers left out.\n"
    commits = [_commit(message, tree)]
    for topic in topics:
        changed: dict[str, bytes] = {}
        for file in topic.rule_files:
            if file.target not in tree:
                raise TargetGone(f"{file.path} edits {file.target}, which {base.name} does not have")
            changed[file.target] = edits.edit(file, tree[file.target]).after
        for path in topic.modules:
            if base.has(path):
                raise collision(topic, path, base)
            changed[path] = (repo.modules / path).read_bytes()
        tree |= changed
        commits.append(_commit(_message(topic), changed))
    return commits


def _message(topic: Topic) -> str:
    lines = [topic.title, "", topic.why, ""]
    for file in topic.rule_files:
        lines += [f"- vllm/{file.target}: {' '.join(rule.message.split())}" for rule in file.rules]
    lines += ["", *(f"Related: {reference}" for reference in topic.upstream)]
    return "\n".join(lines).strip() + "\n"


def _commit(message: str, files: dict[str, bytes]) -> bytes:
    """In fast-import's format; without `from`, each commit continues the branch."""
    parts = [
        f"commit refs/heads/{BRANCH}\nauthor {_IDENTITY}\ncommitter {_IDENTITY}\n".encode(),
        _data(message.encode()),
    ]
    for path, content in sorted(files.items()):
        parts += [f"M 100644 inline vllm/{path}\n".encode(), _data(content)]
    return b"".join(parts) + b"\n"


def _data(content: bytes) -> bytes:
    return b"data %d\n" % len(content) + content + b"\n"


def _git(folder: Path, *arguments: str, stdin: bytes = b"") -> None:
    # The user's settings (line ends, hooks, default branch) must not show in the result.
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        environment.pop(name, None)
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, input=stdin, capture_output=True, env=environment, check=False
        )
    except FileNotFoundError:
        raise GitFailed("git is not installed, and the branch is a git repository") from None
    if done.returncode != 0:
        raise GitFailed(
            f"git {arguments[0]} failed in {folder}: {' '.join(done.stderr.decode('utf-8', 'replace').split())}"
        )
