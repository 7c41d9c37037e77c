"""The JSON directory and the frames around it: what opens, what is refused, by which kind and with which words."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifact import tiny_files as tiny
from ninfer_torch.artifact import open_artifact
from ninfer_torch.artifact.jsontext import MAX_DEPTH, dump_json, parse_json
from ninfer_torch.artifact.schema import dump_directory, is_identifier, parse_directory
from ninfer_torch.errors import ArtifactError, NinferError

BASE = tiny.json_text(tiny.DIRECTORY)


def refused(path: Path, kind: str, *parts: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        open_artifact(path)
    assert caught.value.kind == kind, str(caught.value)
    for part in (path.name, *parts):
        assert part in str(caught.value)


def test_the_base_artifact_opens(tmp_path: Path) -> None:
    artifact = open_artifact(tiny.write(tmp_path / "a.ninfer"))
    assert artifact.artifact_id == "000102030405060708090a0b0c0d0e0f"
    assert list(artifact.objects) == ["r.note", "w.q8", "w.bf", "w.s"]
    assert artifact.components["text"].config == {"hidden_size": 128, "eps": 1e-6}
    assert artifact.use("text/q8", "text/x").activation_policy == "AllowA8"
    assert artifact.resource("r.note") == tiny.NOTE


@pytest.mark.parametrize("version", [0, 4, 9, 255])
def test_other_versions_are_refused_by_number(tmp_path: Path, version: int) -> None:
    path = tmp_path / "a.ninfer"
    path.write_bytes(tiny.entry_bytes(BASE, tiny.payload(), magic=b"NINFER\0" + bytes([version])))
    way_out = ("pip install --upgrade ninfer-torch", "ninfer-torch upgrade OLD NEW")
    refused(path, "framing", f"found container version {version}, expected version 1, 2 or 3", *way_out)


@pytest.mark.parametrize("version", [1, 2])
def test_a_version_3_body_is_no_older_file(tmp_path: Path, version: int) -> None:
    path = tmp_path / "a.ninfer"
    path.write_bytes(tiny.entry_bytes(BASE, tiny.payload(), magic=b"NINFER\0" + bytes([version])))
    refused(path, "json", "not one JSON value")


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ninfer"
    path.write_bytes(b"GGUF" + bytes(100))
    refused(path, "framing", "47 47 55 46", "4e 49 4e 46 45 52 00 03")
    path.write_bytes(tiny.part_bytes(1, b"x"))
    refused(path, "framing", "continuation file")
    path.unlink()
    refused(path, "file", "cannot be opened")
    path.mkdir()
    refused(path, "file", "regular file")


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ('{"a":1,"a":2}', "'a' appears more than once"),
        ('{"b":[{"c":1,"\\u0063":2}]}', "'c' appears more than once"),
        ("NaN", "NaN"),
        ("[-Infinity]", "-Infinity"),
        ("1e999", "overflows binary64"),
        ("-1e400", "overflows binary64"),
        ("[" * 100 + "]" * 100, "levels deep"),
        ("[" * 100_000 + "]" * 100_000, "levels deep"),
        ("[" * 100_000, "levels deep"),
        ('{"a":' * 100_000, "levels deep"),
        ("9" * 5000, "5000 characters"),
        ("01", "not one JSON value"),
        ("+1", "not one JSON value"),
        ("[1,]", "not one JSON value"),
        ('"\t"', "not one JSON value"),
        ('"' + '\\"' * 100_000, "not one JSON value"),
    ],
)
@pytest.mark.parametrize("member", ["metadata", "unknown"])
def test_json_traps_anywhere(tmp_path: Path, inside: str, message: str, member: str) -> None:
    value = tiny.directory()
    value[member] = {"trap": "HERE"}
    text = tiny.json_text(value).replace(b'"HERE"', inside.encode())
    refused(tiny.write(tmp_path / "a.ninfer", text=text), "json", message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xef\xbb\xbf" + BASE, "byte-order mark"),
        (BASE + b"\0", "not one JSON value"),
        (BASE + b"{}", "not one JSON value"),
        (BASE + b"\x0b", "not one JSON value"),
        (BASE.replace(b"tiny", b"ti\xffny"), "not UTF-8"),
        (BASE.replace(b"tiny", b"ti\xed\xa0\x80ny"), "not UTF-8"),
        (BASE.decode().encode("utf-16"), "not UTF-8"),
        (b" " * 50, "not one JSON value"),
    ],
)
def test_texts_that_are_not_one_json_value(tmp_path: Path, text: bytes, message: str) -> None:
    refused(tiny.write(tmp_path / "a.ninfer", text=text), "json", message)


def test_white_space_around_the_value_is_legal(tmp_path: Path) -> None:
    open_artifact(tiny.write(tmp_path / "a.ninfer", text=b" \n\t\r" + BASE + b"\r\n \t" * 3000))


Edit = Callable[[dict[str, Any]], Any]

EDITS: list[tuple[str, str, Edit]] = [
    ("schema", "objects[0]: kind", lambda d: d["objects"][0].update(kind="blob")),
    ("schema", "objects[1] 'w.q8'.shape", lambda d: d["objects"][1].update(shape=[2**32, 2**32])),
    ("schema", "objects[1] 'w.q8'.shape", lambda d: d["objects"][1].update(shape=[1] * 17)),
    ("schema", "objects[1] 'w.q8'.shape[1]", lambda d: d["objects"][1].update(shape=[4, True])),
    ("schema", "objects[1] 'w.q8'.offset", lambda d: d["objects"][1].update(offset=256.0)),
    ("schema", "objects[1] 'w.q8'.bytes", lambda d: d["objects"][1].update(bytes=2**64)),
    ("schema", "objects[1] 'w.q8'.divisors", lambda d: d["objects"][1].update(divisors=0)),
    ("schema", "objects[1]: member 'layout' is missing", lambda d: d["objects"][1].pop("layout")),
    ("schema", "objects[0]: unknown member 'shape'", lambda d: d["objects"][0].update(shape=[5])),
    ("schema", "objects[2].id", lambda d: d["objects"][2].update(id="a\0b")),
    ("schema", "objects[2].id", lambda d: d["objects"][2].update(id="a\ud800")),
    ("schema", "objects[2] 'w.q8': an earlier object", lambda d: d["objects"][2].update(id="w.q8")),
    ("schema", "objects: found []", lambda d: d.update(objects=[])),
    ("range", "objects[1] 'w.q8': offset", lambda d: d["objects"][1].update(offset=2**64 - 1)),
    ("range", "objects[3] 'w.s': ends at byte 1285", lambda d: d["objects"][3].update(bytes=5)),
    ("range", "objects[2] 'w.bf': begins at byte 512", lambda d: d["objects"][2].update(offset=512)),
    ("schema", "components: found no component", lambda d: d.update(components={})),
    ("schema", "components['text'].config", lambda d: d["components"]["text"].update(config=None)),
    ("schema", "components['text']: unknown member", lambda d: d["components"]["text"].update(extra=1)),
    ("schema", "components: found ''", lambda d: d["components"].update({"": {"config": {}}})),
    ("reference", "components['text'].target", lambda d: d["components"]["text"].update(target="vision")),
    ("reference", ".resources['note']", lambda d: d["components"]["text"].update(resources={"note": "w.q8"})),
    ("schema", ".proposal", lambda d: d["components"]["text"].update(proposal={"domain": "full", "rows": 2})),
    ("schema", ".proposal", lambda d: d["components"]["text"].update(proposal={"domain": "indexed"})),
    ("schema", ".proposal.rows", lambda d: d["components"]["text"].update(proposal={"domain": "indexed", "rows": 0})),
    (
        "schema",
        "components['mtp']: has a proposal",
        lambda d: d["components"].update(mtp={"config": {}, "proposal": {"domain": "full"}}),
    ),
    ("reference", "bindings['text/x'].object", lambda d: d["bindings"].update({"text/x": {"object": "absent"}})),
    ("reference", "a resource", lambda d: d["bindings"].update({"text/x": {"object": "r.note"}})),
    ("schema", "bindings['text/x']", lambda d: d["bindings"].update({"text/x": {}})),
    ("schema", "bindings['text/x'].parts", lambda d: d["bindings"].update({"text/x": {"parts": []}})),
    ("range", "bindings['text/x'].parts[0].range", lambda d: d["bindings"].update(bind([["w.bf", 0, 7]]))),
    (
        "range",
        "bindings['text/x'].parts[1].range",
        lambda d: d["bindings"].update(bind([["w.bf", 0, 1], ["w.s", 0, 0]])),
    ),
    ("schema", "bindings['text/x'].parts[0].range", lambda d: d["bindings"].update(bind([["w.bf", 0, 1, 2]]))),
    ("schema", "bindings['text/x'].parts[0].range", lambda d: d["bindings"].update(bind([["w.bf", -1, 2]]))),
    ("reference", "uses[0].parameter", lambda d: d["uses"][0].update(parameter="text/absent")),
    ("schema", "uses[0].activation_policy", lambda d: d["uses"][0].update(activation_policy="AllowA2")),
    ("schema", "uses[0].activation_policy", lambda d: d["uses"][0].update(activation_policy=None)),
    ("schema", "uses[0].input", lambda d: d["uses"][0].update(input="")),
    ("schema", "uses[1]: an earlier use", lambda d: d["uses"].append(d["uses"][0])),
    ("reference", "uses[0].auxiliaries['r']", lambda d: d["uses"][0].update(auxiliaries={"r": {"object": "no"}})),
    ("schema", "files: found []", lambda d: d.update(files=[])),
    ("schema", "files[0]: path", lambda d: d["files"][0].update(path="a")),
    ("schema", "files[0].payload_bytes", lambda d: d["files"][0].update(payload_bytes=0)),
    ("schema", "files[1].path", lambda d: d["files"].append({"path": None, "payload_bytes": 1})),
    ("range", "files[1]: the payload bytes", lambda d: d["files"].append({"path": "p", "payload_bytes": 2**64 - 1})),
    *(
        ("file", "files[1].path", lambda d, path=path: d["files"].append({"path": path, "payload_bytes": 1}))
        for path in ("", ".", "..", "../p", "/p", "s/p", "s\\p", "p\0", "a.ninfer", "\udc80")
    ),
    ("framing", "expected exactly", lambda d: d["files"][0].update(payload_bytes=1285)),
    ("schema", "metadata.name", lambda d: d["metadata"].update(name="")),
    ("schema", "provenance", lambda d: d.update(provenance=[])),
    ("schema", "directory: member 'uses' is missing", lambda d: d.pop("uses")),
    ("schema", "directory: unknown member 'version'", lambda d: d.update(version=3)),
]


def bind(parts: list[list[Any]]) -> dict[str, Any]:
    return {"text/x": {"parts": [{"object": part[0], "range": part[1:]} for part in parts]}}


@pytest.mark.parametrize(("kind", "place", "edit"), EDITS, ids=[f"{kind}-{place}" for kind, place, _ in EDITS])
def test_one_broken_record(tmp_path: Path, kind: str, place: str, edit: Edit) -> None:
    value = tiny.directory()
    edit(value)
    # Escaped, so that lone surrogates reach the reader as JSON can spell them.
    text = json.dumps(value).encode()
    refused(tiny.write(tmp_path / "a.ninfer", text=text), kind, place)


def test_parts_that_overflow_together(tmp_path: Path) -> None:
    value = tiny.directory()
    value["objects"][2]["shape"] = [2**63]
    value["bindings"] = bind([["w.bf", 0, 2**63], ["w.bf", 0, 2**63]])
    refused(tiny.write(tmp_path / "a.ninfer", value), "range", "2^64-1 elements")


def test_the_root_must_be_an_object(tmp_path: Path) -> None:
    refused(tiny.write(tmp_path / "a.ninfer", []), "schema", "directory: found []")


def test_minimal_root_and_component_without_text(tmp_path: Path) -> None:
    value = {"components": {"ngram": {"config": {}}}, "bindings": {}, "uses": []}
    value |= {name: tiny.DIRECTORY[name] for name in ("objects", "files")}
    artifact = open_artifact(tiny.write(tmp_path / "a.ninfer", value))
    assert list(artifact.components) == ["ngram"] and artifact.metadata == {} and artifact.provenance == {}


@pytest.mark.parametrize("sixteenth", range(16))
def test_truncated_entries_never_open(tmp_path: Path, sixteenth: int) -> None:
    path = tiny.write(tmp_path / "a.ninfer")
    blob = path.read_bytes()
    path.write_bytes(blob[: len(blob) * sixteenth // 16])
    with pytest.raises(ArtifactError) as caught:
        open_artifact(path)
    assert caught.value.kind in ("framing", "json")


@pytest.mark.parametrize("json_bytes", [0, 2**63, 2**64 - 1, 1 << 29])
def test_impossible_directory_lengths(tmp_path: Path, json_bytes: int) -> None:
    path = tiny.write(tmp_path / "a.ninfer")
    blob = bytearray(path.read_bytes())
    blob[8:16] = json_bytes.to_bytes(8, "little")
    path.write_bytes(blob)
    with open(path, "r+b") as file:
        file.truncate(1 << 30)  # room for a directory beyond any real one, without its bytes
    refused(path, "framing", "json_bytes")


POOL: list[Any] = [None, True, -1, 0, 1, 3, 256, 2**63, 2**64 - 1, 2**64, 0.5, "", "x", "w.q8", "r.note", "q4_g64_fp16"]
POOL += ["nvfp4", "bf16", "\ud800", [], {}, [[]], [2**62, 4], [1, 2, 3], {"object": "w.q8"}, {"domain": "full"}]


def slots(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) pair inside a JSON value."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found += [(value, key), *slots(value[key])]
    return found


def mutated(dice: random.Random) -> bytes:
    """The base text with a few values replaced, removed or doubled, or with a few bytes changed."""
    if dice.random() < 0.3:
        text = bytearray(BASE)
        for _ in range(dice.randint(1, 4)):
            spot = dice.randrange(len(text))
            text[spot : spot + dice.randint(0, 3)] = dice.choices(b'{}[]":,0129eE+-.\\u\xff\x00n', k=dice.randint(0, 3))
        return bytes(text)
    value = tiny.directory()
    for _ in range(dice.randint(1, 3)):
        container, key = dice.choice(slots(value))
        change = dice.random()
        if change < 0.7:
            container[key] = copy.deepcopy(dice.choice(POOL))
        elif change < 0.9 or isinstance(container, dict):
            del container[key]
        else:
            container.append(copy.deepcopy(container[key]))
    return json.dumps(value).encode()


def test_a_thousand_damaged_directories_open_or_raise_typed_errors(tmp_path: Path) -> None:
    dice = random.Random(20)
    opened = 0
    for number in range(1000):
        path = tiny.write(tmp_path / f"{number}.ninfer", text=mutated(dice))
        try:
            artifact = open_artifact(path)
        except NinferError:
            continue
        opened += 1
        for name in artifact.bindings:
            for ask in (artifact.parameter, artifact.dequantize_parameter):
                try:
                    ask(name)
                except NinferError:
                    pass
        for object_id in artifact.objects:
            try:
                artifact.read_object(object_id, check=True)
            except NinferError:
                pass
    assert 20 < opened < 900  # the damage neither always nor never shows


def test_directory_text_round_trips() -> None:
    directory = parse_directory(BASE, "a")
    again = dump_directory(directory)
    assert parse_directory(again, "a") == directory
    assert json.loads(again) == tiny.DIRECTORY


NUMBERS = [
    "1e-6",
    "1E5",
    "1.50",
    "-0",
    "-0.0",
    "0.1",
    "1e-06",
    "12345678901234567890123",
    "1.7976931348623157e308",
    "5e-324",
]


@pytest.mark.parametrize("spelling", NUMBERS)
def test_numbers_keep_their_spelling(spelling: str) -> None:
    value = parse_json(f"[{spelling}]".encode(), "a")
    assert dump_json(value) == f"[{spelling}]".encode()
    assert value == json.loads(f"[{spelling}]")
    assert dump_json(copy.deepcopy(value)) == dump_json(pickle.loads(pickle.dumps(value))) == dump_json(value)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_json_values_round_trip_as_the_standard_library_spells_them(value: Any) -> None:
    text = dump_json(value)
    assert text == json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    assert parse_json(text, "a") == value


@given(st.text(st.characters(codec=None), max_size=8))
def test_any_string_survives_lone_surrogates_included(text: str) -> None:
    joined = re.sub(
        "[\ud800-\udbff][\udc00-\udfff]", "", text
    )  # a pair of surrogates reads back as the character it spells
    assert parse_json(dump_json({joined: joined}), "a") == {joined: joined}


@given(st.text(max_size=8) | st.integers() | st.none())
def test_identifiers(value: Any) -> None:
    assert is_identifier(value) == (isinstance(value, str) and value != "" and "\0" not in value)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, {1: 2}, b"x", {"a": object()}], ids=lambda value: type(value).__name__
)
def test_values_that_json_cannot_hold_are_refused(value: Any) -> None:
    with pytest.raises(ArtifactError) as caught:
        dump_json(value)
    assert caught.value.kind == "json"


def test_integers_beyond_the_limit_are_refused_both_ways() -> None:
    longest = 10**4300 - 1
    assert parse_json(dump_json([longest, -longest]), "a") == [longest, -longest]
    with pytest.raises(ArtifactError, match="4300 digits"):
        dump_json({"big": longest + 1})
    with pytest.raises(ArtifactError, match="4300 digits"):
        dump_json(10**1_000_000)


def test_depth_limit_is_the_same_both_ways() -> None:
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert dump_json(parse_json(deepest, "a")) == deepest
    with pytest.raises(ArtifactError, match="levels deep"):
        parse_json(b'{"a":' + deepest + b"}", "a")
    with pytest.raises(ArtifactError, match="levels deep"):
        dump_json([parse_json(deepest, "a")])
