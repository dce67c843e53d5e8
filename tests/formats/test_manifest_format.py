import json
import os
from pathlib import Path

import pytest

from headway.errors import StorageError
from headway.formats.manifest import NAME, publish, read_manifest, staging, verify, write_manifest


def manifest_of(directory):
    """Return its manifest: there is one."""
    manifest = read_manifest(directory)
    assert manifest is not None
    return manifest


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "weights" / "00000001"
    (path / "nested").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "nested" / "tokenizer.json").write_bytes(b"{}")
    write_manifest(path, kind="weights", lineage="ab12", id=1, extra={"note": "x"})
    return path


def rewrite(directory, **changes):
    content = json.loads((directory / NAME).read_bytes())
    (directory / NAME).write_text(json.dumps({**content, **changes}))


def test_a_manifest_names_every_file_and_what_its_writer_added(directory):
    manifest = manifest_of(directory)
    assert (manifest.kind, manifest.lineage, manifest.id, manifest.extra) == ("weights", "ab12", 1, {"note": "x"})
    assert sorted(manifest.files) == ["model.safetensors", "nested/tokenizer.json"]
    assert manifest.files["model.safetensors"].size == 7
    assert json.loads((directory / NAME).read_bytes())["note"] == "x"
    verify(directory, manifest)


@pytest.mark.parametrize("name", ["model.safetensors", "nested/tokenizer.json"])
@pytest.mark.parametrize("how", ["gone", "shorter", "changed"])
def test_a_file_that_is_not_as_written_is_named(directory, name, how):
    path, manifest = directory / name, manifest_of(directory)
    data = path.read_bytes()
    path.unlink() if how == "gone" else path.write_bytes(data[:-1] if how == "shorter" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(StorageError, match=name):
        verify(directory, manifest)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "nested/../../secret", "link"])
def test_a_manifest_cannot_point_outside_its_directory(directory, name):
    secret = directory.parent / "secret"
    secret.write_bytes(b"secret")
    (directory / "link").symlink_to(secret)
    rewrite(directory, files={name: {"size": 6, "sha256": "0" * 64}})
    with pytest.raises(StorageError, match="outside its directory"):
        verify(directory, manifest_of(directory))


def test_a_directory_without_a_valid_manifest_does_not_exist(directory, tmp_path):
    assert read_manifest(tmp_path / "nowhere") is None
    assert read_manifest(directory / "model.safetensors") is None
    for changes in ({"kind": "poem"}, {"id": "one"}, {"files": {"a": {"size": 1}}}, {"lineage": None}):
        rewrite(directory, **changes)
        assert read_manifest(directory) is None
        write_manifest(directory, kind="weights", lineage="ab12", id=1)
    for content in ("", "[]", "null", '{"format_version": 1}'):
        (directory / NAME).write_text(content)
        assert read_manifest(directory) is None


def test_a_manifest_cut_anywhere_is_no_manifest(directory):
    data = (directory / NAME).read_bytes().rstrip()
    for cut in range(len(data)):
        (directory / NAME).write_bytes(data[:cut])
        assert read_manifest(directory) is None


def test_a_newer_format_is_refused_and_not_waited_for(directory):
    rewrite(directory, format_version=2)
    with pytest.raises(StorageError, match="install a newer headway"):
        read_manifest(directory)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1.0, -float("inf")], {"deep": float("nan")}])
def test_a_manifest_is_strict_json_or_is_not_written(tmp_path, value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_manifest(tmp_path, kind="batch", lineage="ab12", id=0, extra={"temperature": value})
    assert read_manifest(tmp_path) is None


def test_extra_keys_cannot_replace_a_manifests_own(directory):
    with pytest.raises(ValueError, match="files"):
        write_manifest(directory, kind="weights", lineage="ab12", id=1, extra={"files": {}})


def test_publishing_renames_the_whole_directory_and_widens_what_a_library_wrote_for_its_owner_only(tmp_path):
    final = tmp_path / "weights" / "00000002"
    final.parent.mkdir()
    temporary = staging(final)
    assert temporary.parent == final.parent
    assert temporary.name.startswith(".tmp-00000002-")
    descriptor = os.open(temporary / "model.safetensors", os.O_WRONLY | os.O_CREAT, 0o600)
    os.close(descriptor)
    write_manifest(temporary, kind="weights", lineage="ab12", id=2)
    publish(temporary, final)
    verify(final, manifest_of(final))
    assert [path.name for path in final.parent.iterdir()] == ["00000002"]
    assert (final / "model.safetensors").stat().st_mode & 0o777 == (final / NAME).stat().st_mode & 0o777


def test_nothing_is_filled_where_the_directory_around_it_is_gone(tmp_path):
    with pytest.raises(StorageError, match=r"weights.*cannot be created: No such file or directory"):
        staging(tmp_path / "weights" / "00000002")
    assert not (tmp_path / "weights").exists()


def test_publishing_over_a_taken_name_is_refused_and_changes_nothing(directory):
    temporary = staging(directory)
    with pytest.raises(StorageError, match="exists already"):
        publish(temporary, directory)
    verify(directory, manifest_of(directory))


def test_what_the_system_refuses_is_said_with_the_file_and_the_remedy(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot be created: Not a directory"):
        staging(Path(tmp_path / "file" / "00000001"))
