"""`fork apply --installed`: the series applied in place to the pinned release that an image already holds."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass

from fork import dist_info, release, series, targets, topics, transaction, upstream
from fork.disk import sha256
from fork.errors import EditedByHand, NotApplied, StaleFile, TargetDiffers, listed
from fork.package import InstalledBase, Package, require_release
from fork.repo import Repo


@dataclass(frozen=True)
class Entry:
    """One changed file; None where there was none before."""

    before: bytes | None
    after: str


def apply(repo: Repo, package: Package, force: bool = False) -> bool:
    """True if anything had to be written."""
    pinned = upstream.load(repo.upstream_toml)
    require_release(package, pinned.version)
    earlier = _read(package)
    if changed := _edited_since(package, earlier):
        if not force:
            raise EditedByHand(package.site, changed)
    originals = {path: entry.before for path, entry in earlier.items()}
    base = InstalledBase(package, originals)
    series_topics = topics.load_all(repo)
    _require_pinned(repo, base, series_topics, package)
    outcome = series.apply(repo, series_topics, base)

    wanted = {f"vllm/{path}": after for path, (_, after) in outcome.files.items()}
    wanted[f"vllm/{release.PATH}"] = release.text(pinned.our_version("cuda"))
    wanted |= {f"vllm/{path}": file.read_bytes() for path, file in outcome.added.items()}
    before = {path: base.read(path.removeprefix("vllm/")) for path in wanted}
    if package.record:
        before[package.record] = originals.get(package.record) or (package.site / package.record).read_bytes()
        wanted[package.record] = _record(before[package.record], wanted, package)
    if earlier and all(_current(package, path) == content for path, content in wanted.items()):
        if wanted.keys() == earlier.keys():
            return False
    # The manifest goes first: whatever happens to this process later, --revert knows what to undo.
    undone = {path: content for path, content in originals.items() if path not in wanted}
    transaction.commit(package.site, {package.manifest: _dump(before, wanted), **undone, **wanted})
    return True


def revert(package: Package, force: bool = False) -> int:
    """Number of files that are upstream's again."""
    earlier = _read(package)
    if not earlier:
        raise NotApplied(f"{package.site} has no {package.manifest}, so there is nothing to revert")
    if (changed := _edited_since(package, earlier)) and not force:
        raise EditedByHand(package.site, changed)
    changes: dict[str, bytes | None] = {path: entry.before for path, entry in earlier.items()}
    transaction.commit(package.site, {**changes, package.manifest: None})
    return len(changes)


def _require_pinned(repo: Repo, base: InstalledBase, series_topics: list[topics.Topic], package: Package) -> None:
    """Rules may match in a file that differs elsewhere; the result would be a mix that nobody tested.

    _version.py is left out: it is ours in the result, and differs between a release's wheel and its image.
    """
    pinned = targets.load(repo)
    paths = sorted({file.target for topic in series_topics for file in topic.rule_files})
    if unknown := [path for path in paths if path not in pinned]:
        raise StaleFile(f"{repo.targets} has no hash of {listed(unknown)}; {targets.REFRESH}")
    contents = {path: base.read(path) for path in paths}
    differing = [path for path, text in contents.items() if text is None or sha256(text) != pinned[path]]
    if differing:
        raise TargetDiffers(
            f"vllm {package.version} in {package.site} differs from the pinned release in {listed(differing)}; "
            "nothing was written: reinstall that release"
        )


def _record(before: bytes, wanted: dict[str, bytes], package: Package) -> bytes:
    """RECORD with our hashes, so that `pip uninstall` takes the added modules along."""
    rows = {line[0]: line for line in dist_info.record_lines(before.decode())}
    rows |= {path: dist_info.record_line(path, content) for path, content in wanted.items()}
    # Without a hash: the manifest holds that of RECORD, so one of the two cannot hold the other's.
    rows[package.manifest] = (package.manifest, "", "")
    return dist_info.record_text(list(rows.values()))


def _edited_since(package: Package, earlier: dict[str, Entry]) -> list[str]:
    """Files that are neither ours nor upstream's. Upstream's are no edit: a killed apply leaves some."""
    found = []
    for path, entry in earlier.items():
        current = _current(package, path)
        if current != entry.before and (current is None or sha256(current) != entry.after):
            found.append(path)
    return found


def _current(package: Package, path: str) -> bytes | None:
    file = package.site / path
    return file.read_bytes() if file.is_file() else None


def _dump(before: dict[str, bytes | None], wanted: dict[str, bytes]) -> bytes:
    files = {}
    for path, content in wanted.items():
        original = before[path]
        files[path] = {
            "before": None if original is None else sha256(original),
            "after": sha256(content),
            "original": None if original is None else base64.b64encode(zlib.compress(original)).decode(),
        }
    return (json.dumps({"format": 1, "files": files}, indent=1) + "\n").encode()


def _read(package: Package) -> dict[str, Entry]:
    content = _current(package, package.manifest)
    if content is None:
        return {}
    try:
        files = json.loads(content)["files"]
        return {
            path: Entry(
                None if entry["original"] is None else zlib.decompress(base64.b64decode(entry["original"])),
                entry["after"],
            )
            for path, entry in files.items()
        }
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise NotApplied(f"{package.site / package.manifest} cannot be read ({error}); reinstall vllm") from None
