"""Recipes: selectors, selections, groups, sharing and uses, and what becomes of them in a file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from ninfer_torch.artifact import open_artifact
from ninfer_torch.cli import main
from ninfer_torch.convert.methods import quantize
from ninfer_torch.convert.pipeline import convert, plan
from ninfer_torch.convert.presets import PRESETS
from ninfer_torch.convert.recipes import Parameter, Recipe, RecipeModel
from ninfer_torch.convert.settings import parse_setting
from ninfer_torch.convert.source import SourceTensor
from ninfer_torch.errors import ConversionError, FormatError, LayoutError
from ninfer_torch.tensors import NinferTensor
from tiny_models import save_folder, tiny_llama

ARTIFACT_ID = "0f" * 16
LAYER = "text/model.layers.0"
QUERY, KEY, VALUE = (f"{LAYER}.self_attn.{which}_proj.weight" for which in "qkv")
GATE, UP, DOWN = (f"{LAYER}.mlp.{which}_proj.weight" for which in ("gate", "up", "down"))
HEAD, EMBEDDING, NORM = "text/lm_head.weight", "text/model.embed_tokens.weight", "text/model.norm.weight"


def small_model(**shapes: tuple[int, ...]) -> RecipeModel:
    return RecipeModel(
        "Tiny", {}, {name: Parameter(name, shape, "linear", (f"{name}/in",)) for name, shape in shapes.items()}
    )


def small_recipe(model: RecipeModel | None = None) -> Recipe:
    model = model or small_model(a=(8, 64), b=(4, 64), c=(4, 32), v=(4,))
    return Recipe(model, dict.fromkeys(model.parameters, "bf16"), ("checkpoint", "other"))


def objects(recipe: Recipe) -> list[tuple[list[tuple[str, int, int]], str]]:
    return [
        ([(piece.parameter, piece.begin, piece.end) for piece in parent.pieces], parent.selection.format)
        for parent in recipe.parents()
    ]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(tied=False)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("recipes") / "model", model)


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("recipes") / "tied", tiny_llama(tied=True))


# --- selectors -------------------------------------------------------------------------------------------------------


def test_selectors_are_names_patterns_or_lists() -> None:
    names = ("text/layers/0/mlp/down", "text/layers/10/mlp/down", "text/layers/1/mlp/Down", "vision/mlp/down")
    model = small_model(**dict.fromkeys(names, (4, 4)))
    assert model.match("text/*/down") == names[:2]
    assert model.match("*down") == (names[0], names[1], names[3])
    assert model.match("text/layers/?/mlp/[dD]own") == (names[0], names[2])
    assert model.match([names[3], "text/layers/0*"]) == (names[0], names[3])
    assert model.layers == 11 and model.parameters[names[1]].layer == 10


def test_dots_and_slashes_are_one_separator_in_patterns() -> None:
    model = small_model(**{"text/model.layers.0.mlp.down_proj.weight": (4, 4)})
    assert (
        model.match("text/*/mlp.down_proj.weight")
        == model.match("text/model/layers/*/mlp/*")
        == tuple(model.parameters)
    )


@pytest.mark.parametrize("selectors", ["text/layers/0/mlp/dwn", ["a*", "text/layers/0/mlp/DOWN"]])
def test_a_selector_without_a_match_says_what_exists(selectors: Any) -> None:
    model = small_model(**{"text/layers/0/mlp/down": (4, 4), "a": (4, 4)})
    with pytest.raises(ConversionError, match="selector 'text/layers/0/mlp/[Dd].*' matches no parameter.*mlp/down"):
        model.match(selectors)
    with pytest.raises(ConversionError, match="'zzz' matches no parameter; Tiny has text/layers/0/mlp/down, a"):
        model.match("zzz")


# --- selections ------------------------------------------------------------------------------------------------------


def test_only_given_arguments_change_and_later_calls_win() -> None:
    recipe = small_recipe()
    assert all(s.format == "bf16" and s.method == "cast_direct" for name in "abcv" for s in recipe.selections(name))
    recipe.assign("[ab]", "q4_g64_fp16", method="grouped_search", parameters={"negative_scales": True})
    recipe.assign("a", "q6_g64_fp16")
    recipe.assign("b", source="other", layout="auto")
    (a,), (b,), (c,) = (recipe.selections(name) for name in "abc")
    assert (a.format, a.method, a.parameters) == ("q6_g64_fp16", "grouped_search", {"negative_scales": True})
    assert (b.format, b.source) == ("q4_g64_fp16", "other") and (c.format, c.source) == ("bf16", "checkpoint")


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8), st.sampled_from(["fp32", "bf16"])), max_size=6))
def test_row_assignments_are_those_of_a_table_of_rows(calls: list[tuple[int, int, str]]) -> None:
    recipe, rows = small_recipe(), ["bf16"] * 8
    for first, count, format in calls:
        end = min(first + count, 8)
        recipe.assign("a", format, rows=(first, end))
        rows[first:end] = [format] * (end - first)
    found = [
        format for pieces, format in objects(recipe) for _, begin, end in pieces if _ == "a" for _ in range(begin, end)
    ]
    assert found == rows
    runs = 1 + sum(left != right for left, right in itertools.pairwise(rows))
    assert len(recipe.selections("a")) == runs


@pytest.mark.parametrize("rows", [(0, 9), (3, 3), (-1, 2), (5, 4)])
def test_rows_outside_a_parameter(rows: tuple[int, int]) -> None:
    with pytest.raises(ConversionError, match=r"no range of 'a', which has 8 rows"):
        small_recipe().assign("a", "fp32", rows=rows)


def test_wrong_arguments_are_named() -> None:
    recipe = small_recipe()
    with pytest.raises(FormatError, match="q3"):
        recipe.assign("a", "q3")
    with pytest.raises(LayoutError, match="'a': format q4_g64_fp16 lies in layout row_split_k128_v1, not row_scale_v1"):
        recipe.assign("a", "q4_g64_fp16", "row_scale_v1")
    with pytest.raises(ConversionError, match="unknown source 'x'; the sources are checkpoint, other"):
        recipe.assign("a", source="x")
    with pytest.raises(ConversionError, match="unknown activation policy 'A8'; known: A16Only, AllowA8, AllowA4"):
        recipe.assign("a", activation_policy="A8")
    with pytest.raises(ConversionError, match="JSON"):
        recipe.assign("a", parameters={"x": {1, 2}})
    with pytest.raises(ConversionError, match="no parameter 'd'"):
        recipe.share("d", "a")


# --- groups, sharing, packing, uses ----------------------------------------------------------------------------------


def test_groups_join_rows_in_the_given_order() -> None:
    recipe = small_recipe()
    recipe.group(["b", "a"])
    assert objects(recipe) == [
        ([("b", 0, 4), ("a", 0, 8)], "bf16"),
        ([("c", 0, 4)], "bf16"),
        ([("v", 0, 4)], "bf16"),
    ]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda r: r.assign("b", "fp32"), "expected one format, method .* b: fp32 by cast_direct"),
        (lambda r: r.assign("b", parameters={"x": 1}), "expected one format"),
        (lambda r: r.assign("b", "fp32", rows=(0, 2)), "'b' is split into 2 row ranges"),
        (lambda r: r.group(["b", "c"]), "'b' is in a group already"),
    ],
)
def test_members_of_a_group_must_agree(spoil: Callable[[Recipe], None], message: str) -> None:
    recipe = small_recipe()
    recipe.group(["a", "b"])
    with pytest.raises(ConversionError, match=message):
        spoil(recipe)
        recipe.parents()


def test_groups_need_rows_of_one_length() -> None:
    for group in (["a", "c"], ["c", "v"]):
        recipe = small_recipe()
        recipe.group(group)
        with pytest.raises(ConversionError, match="rows of one length"):
            recipe.parents()
    for group in (["a"], ["a", "a"]):
        with pytest.raises(ConversionError, match="at least two different parameters"):
            small_recipe().group(group)


def test_sharing_ends_where_a_selection_changes() -> None:
    recipe = small_recipe(small_model(a=(4, 64), b=(4, 64), c=(4, 64)))
    recipe.share("b", "a")
    recipe.share("c", "b")
    assert recipe.owners() == {"a": "a", "b": "a", "c": "a"}
    with pytest.raises(ConversionError, match="cycle"):
        recipe.share("a", "c")
    recipe.assign("a", "fp32")
    assert recipe.owners()["c"] == "a"
    recipe.assign("b", "fp32")
    assert recipe.owners() == {"a": "a", "b": "b", "c": "b"}
    with pytest.raises(ConversionError, match=r"'a' of shape \[8, 64\] cannot share 'b' of shape \[4, 64\]"):
        small_recipe().share("a", "b")


def test_a_shared_parameter_is_in_no_group() -> None:
    recipe = small_recipe(small_model(a=(4, 64), b=(4, 64), c=(4, 64)))
    recipe.share("b", "a")
    recipe.group(["b", "c"])
    with pytest.raises(ConversionError, match="'b' shares another parameter's object"):
        recipe.parents()


def packed_recipe() -> Recipe:
    model = small_model(a=(8, 64), b=(4, 64), c=(4, 64))
    return small_recipe(RecipeModel("Tiny", {}, model.parameters, (("a", "c"),)))


@pytest.mark.parametrize(
    "objection",
    [
        lambda recipe: recipe.separate("c"),
        lambda recipe: recipe.assign("c", "fp32"),
        lambda recipe: recipe.assign("c", "bf16", rows=(0, 1), parameters={"x": 1}),
        lambda recipe: recipe.assign("[ac]", method=lambda rows, format: rows),
        lambda recipe: recipe.group(["c", "b"]),
        lambda recipe: recipe.share("c", "b"),
    ],
)
def test_a_model_packs_what_agrees_unless_a_recipe_objects(objection: Callable[[Recipe], None]) -> None:
    recipe = packed_recipe()
    assert objects(recipe)[0][0] == [("a", 0, 8), ("c", 0, 4)] and len(objects(recipe)) == 2
    objection(recipe)
    assert [("a", 0, 8), ("c", 0, 4)] not in [pieces for pieces, _ in objects(recipe)]


def test_policies_belong_to_uses() -> None:
    recipe = small_recipe()
    recipe.assign("*", activation_policy="AllowA8")
    recipe.use("b", "b/in", "AllowA4", {"activation_input_divisor": 2})
    recipe.use("a", "elsewhere")
    assert recipe.uses["a", "a/in"].activation_policy == "AllowA8"
    assert recipe.uses["a", "elsewhere"].activation_policy == "A16Only"
    assert recipe.uses["b", "b/in"].auxiliaries == {"activation_input_divisor": 2}
    for auxiliaries in ({"hadamard_signs": 1.0}, {"activation_input_divisor": 0.0}, {"activation_input_divisor": "x"}):
        with pytest.raises(ConversionError, match="expected activation_input_divisor as a positive finite number"):
            recipe.use("a", "a/in", auxiliaries=auxiliaries)


# --- files -----------------------------------------------------------------------------------------------------------


RECIPE = f"""
def configure(model, recipe, sources):
    assert model.architecture == "LlamaForCausalLM" and model.layers == 2
    assert sources["checkpoint"].tensors["{QUERY}"].encoding == "bf16"
    recipe.assign("*_proj.weight", "q4_g64_fp16", method="grouped_absmax", activation_policy="AllowA8")
    recipe.assign("{DOWN}", "q6_g64_fp16", method="grouped_search", parameters={{"negative_scales": True}})
    recipe.assign("{GATE}", "bf16", method="cast_direct", rows=(0, 32))
    recipe.group(["{KEY}", "{VALUE}"])
    recipe.assign("text/lm_head.weight", "q8_g32_fp16", method=double)


def double(rows, format):
    import torch
    from ninfer_torch.convert import grouped_absmax
    return grouped_absmax(rows.float() * 2, format)
"""


def test_a_recipe_file_becomes_an_artifact(folder: Path, model: Any, tmp_path: Path) -> None:
    file, output = tmp_path / "mixed.py", tmp_path / "mixed.ninfer"
    file.write_text(RECIPE)
    report = convert(folder, output, recipe=file, artifact_id=ARTIFACT_ID)
    state = {f"text/{name}": value.detach() for name, value in model.state_dict().items()}
    with open_artifact(output) as artifact:
        assert artifact.provenance["recipe"] == "mixed.py"
        for name, value in state.items():
            stored = artifact.dequantize_parameter(name, shape=tuple(value.shape))
            assert stored.shape == value.shape
            if value.dim() == 1 or name == EMBEDDING:
                assert torch.equal(artifact.parameter(name, shape=tuple(value.shape)), value)
        query, down, head = (artifact.parameter(name) for name in (QUERY, DOWN, HEAD))
        assert isinstance(down, NinferTensor) and down.format == "q6_g64_fp16" and query.policy == "AllowA8"
        expected = quantize(state[DOWN], "q6_g64_fp16", "grouped_search", negative_scales=True)
        assert torch.equal(down, expected)
        assert torch.equal(head, quantize(state[HEAD].float() * 2, "q8_g32_fp16"))
        key, value = artifact.parameter(KEY), artifact.parameter(VALUE)
        parents = {part.object for name in (KEY, VALUE) for part in artifact.bindings[name].parts}
        assert parents == {"weight/000000"}
        assert torch.equal(key.dequantize(), quantize(state[KEY], "q4_g64_fp16").dequantize())
        assert torch.equal(value.dequantize(), quantize(state[VALUE], "q4_g64_fp16").dequantize())
        gate = artifact.dequantize_parameter(GATE)
        assert torch.equal(gate[:32], state[GATE][:32].float())
        assert torch.equal(gate[32:], quantize(state[GATE][32:], "q4_g64_fp16").dequantize())
        for object_id in artifact.objects:
            artifact.read_object(object_id, check=True)
    by_object = {entry.object: entry for entry in report.tensors}
    assert by_object["weight/000000"].parameters == (KEY, VALUE)
    assert any(entry.method == "double" for entry in report.tensors)


def test_recipe_files_that_fail_are_named(folder: Path, tmp_path: Path) -> None:
    texts = {
        "no configure": ("x = 1", "expected a function configure"),
        "syntax": ("def configure(", "cannot be read: SyntaxError"),
        "crash": ("def configure(model, recipe, sources):\n    1 / 0", "configure failed: ZeroDivisionError"),
        "selector": ("def configure(m, recipe, s):\n    recipe.assign('nope', 'bf16')", "selector 'nope'"),
    }
    for name, (text, message) in texts.items():
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        with pytest.raises(ConversionError, match=f"{name}.py: .*{message}"):
            plan(folder, recipe=file)
    with pytest.raises(ConversionError, match="no such recipe file"):
        plan(folder, recipe=tmp_path / "absent.py")


def test_a_parameter_may_come_from_another_source(folder: Path, tied_folder: Path, tmp_path: Path) -> None:
    other = tiny_llama(tied=True).state_dict()

    def configure(model: Any, recipe: Recipe, sources: Any) -> None:
        recipe.assign(DOWN, source="second")

    output = tmp_path / "two.ninfer"
    convert(folder, output, recipe=configure, sources={"second": tied_folder})
    with open_artifact(output) as artifact:
        assert torch.equal(artifact.parameter(DOWN), other[DOWN.removeprefix("text/")])
        assert set(artifact.provenance["sources"]) == {"huggingface", "second"}
    with pytest.raises(ConversionError, match="'checkpoint' is the name of the main source"):
        plan(folder, sources={"checkpoint": tied_folder})


def test_tied_parameters_share_until_they_differ(tied_folder: Path) -> None:
    outline = plan(tied_folder).outline
    (entry,) = (entry for entry in outline.tensors if HEAD in entry.parameters)
    assert set(entry.parameters) == {HEAD, EMBEDDING}
    apart = plan(tied_folder, settings=[f"{HEAD}=q6_g64_fp16"]).outline
    entries = [entry for entry in apart.tensors if {HEAD, EMBEDDING} & set(entry.parameters)]
    assert [(entry.parameters, entry.format) for entry in entries] == [
        ((EMBEDDING,), "q8_g32_fp16"),
        ((HEAD,), "q6_g64_fp16"),
    ]
    assert all("stored apart from its tied twin" in entry.note for entry in entries)
    both = plan(tied_folder, settings=[f"{HEAD}=q6_g64_fp16", f"{EMBEDDING}=q6_g64_fp16"]).outline
    assert len(both.tensors) == len(outline.tensors)


@pytest.mark.parametrize("preset", ["q4", "q8", "direct", "fp8"])
def test_a_preset_is_a_recipe_written_out(folder: Path, preset: str) -> None:
    formats = PRESETS[preset].formats

    def by_hand(model: Any, recipe: Recipe, sources: Any) -> None:
        for name, parameter in model.parameters.items():
            if parameter.kind in formats:
                format = formats[parameter.kind]
                recipe.assign(name, format, method="fp8_row_maxabs" if preset == "fp8" else "grouped_absmax")

    assert plan(folder, preset).outline.tensors == plan(folder, recipe=by_hand).outline.tensors


# --- settings and the command line -----------------------------------------------------------------------------------


def test_settings_pick_the_usual_method_only_where_they_must() -> None:
    recipe = small_recipe()
    parse_setting("a=q4_g64_fp16:grouped_search:negative_scales=true").apply(recipe)
    parse_setting("b=q4_g64_fp16").apply(recipe)
    assert recipe.selections("a")[0].parameters == {"negative_scales": True}
    assert recipe.selections("b")[0].method == "grouped_absmax"
    parse_setting("[ab]=q5_g64_fp16").apply(recipe)
    assert [recipe.selections(name)[0].method for name in "ab"] == ["grouped_search", "grouped_absmax"]
    parse_setting("a=fp32:cast_direct:source=other,activation_policy=AllowA8").apply(recipe)
    (a,) = recipe.selections("a")
    assert (a.format, a.method, a.source) == ("fp32", "cast_direct", "other")
    assert recipe.uses["a", "a/in"].activation_policy == "AllowA8"
    parse_setting("a=q6_g64_fp16:grouped_search:imatrix=/home/me/x.safetensors").apply(recipe)
    parse_setting("a=bf16").apply(recipe)
    assert recipe.selections("a")[0].parameters == {} and recipe.selections("a")[0].method == "cast_direct"


def test_settings_are_written_down_without_paths() -> None:
    text = "a*=q4_g64_fp16:grouped_search:imatrix=/home/me/x.safetensors,negative_scales=true"
    assert str(parse_setting(text)) == text.replace("/home/me/", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", "expected SELECTOR=FORMAT"),
        ("=q4_g64_fp16", "expected SELECTOR=FORMAT"),
        ("a=q4_g64_fp16:magic", "unknown method 'magic'"),
        ("a=q4_g64_fp16:grouped_search:negative", "found 'negative', expected NAME=VALUE"),
        ("a=q3", "q3"),
    ],
)
def test_broken_settings(text: str, message: str) -> None:
    with pytest.raises((ConversionError, FormatError), match=message):
        parse_setting(text)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("*q_proj.weight=q4_g64_fp16:cast_direct", "cast_direct does not write q4_g64_fp16"),
        ("*q_proj.weight=q4_g64_fp16:grouped_absmax:speed=1", "grouped_absmax has no parameter 'speed'"),
        ("*q_proj.weight=gguf_q8_0:import_encoded", "no registered block rows"),
        ("*norm.weight=q4_g64_fp16:grouped_absmax", "holds matrices"),
        ("*q_proj.weight=bf16::activation_policy=AllowA4", "neither the recipe nor the source states one"),
    ],
)
def test_what_cannot_be_written_is_said_while_planning(folder: Path, setting: str, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        plan(folder, settings=[setting])


def test_the_plan_is_what_the_conversion_does(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choices = ["--set", "text/*/mlp.down_proj.weight=q6_g64_fp16:grouped_search", "--set", f"{QUERY}=bf16"]
    assert main(["convert", str(folder), "--plan", "--json", *choices]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["convert", str(folder), "--plan", *choices]) == 0
    table = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    output = tmp_path / "a.ninfer"
    assert main(["convert", str(folder), str(output), "--json", *choices]) == 0
    done = json.loads(capsys.readouterr().out)
    assert {key: done[key] for key in planned} == planned
    with open_artifact(output) as artifact:
        stored = {record.id: record for record in artifact.objects.values() if record.id.startswith("weight/")}
        assert {entry["object"]: entry["bytes"] for entry in planned["tensors"]} == {
            object_id: record.bytes for object_id, record in stored.items()
        }
        assert [entry["layout"] for entry in planned["tensors"]] == [record.layout for record in stored.values()]
    for entry in planned["tensors"]:
        (line,) = (line for line in table.splitlines() if line.startswith(f"{entry['parameters'][0]} "))
        bits = 8 * entry["bytes"] / torch.Size(entry["shape"]).numel()
        assert all(word in line for word in (entry["format"], entry["method"], f"{entry['bytes']:,}", f"{bits:.2f}"))
    assert f"{planned['totals']['bits_per_weight']:.3f} bits per weight" in table
    assert "q6_g64_fp16 x 2" in table


def test_plan_and_conversion_need_what_they_need(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(folder)]) == 1
    assert "no output file is named" in capsys.readouterr().err
    assert main(["convert", str(folder), "--plan", "--source", "x"]) == 1
    assert "expected NAME=PATH" in capsys.readouterr().err


def test_the_report_lies_beside_and_names_no_folder(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "private" / "a.ninfer"
    output.parent.mkdir()
    recipe = tmp_path / "private" / "mine.py"
    recipe.write_text(RECIPE)
    report = convert(folder, output, recipe=recipe, settings=["*q_proj.weight=q5_g64_fp16"], artifact_id=ARTIFACT_ID)
    beside = json.loads((tmp_path / "private" / "a.ninfer.conversion.json").read_text())
    assert beside == json.loads(report.to_json())
    assert beside["artifact"] == "a.ninfer" and beside["artifact_id"] == ARTIFACT_ID and beside["seconds"] > 0
    assert beside["provenance"]["override"] == ["*q_proj.weight=q5_g64_fp16"]
    assert beside["totals"]["uses"] == 15 and beside["totals"]["parameters"] == 21
    with open_artifact(output) as artifact:
        records = json.dumps([dict(artifact.provenance), dict(artifact.metadata), beside])
        assert beside["payload_bytes"] == sum(file.payload_bytes for file in artifact.files)
        assert dict(artifact.provenance) == beside["provenance"]
    assert str(tmp_path) not in records and str(folder.parent) not in records
    again = tmp_path / "b.ninfer"
    convert(folder, again, recipe=recipe, settings=["*q_proj.weight=q5_g64_fp16"], artifact_id=ARTIFACT_ID)
    assert again.read_bytes() == output.read_bytes()


# --- encoded sources -------------------------------------------------------------------------------------------------


class EncodedSource:
    """A Llama of one layer whose projections are nvfp4 matrices, but for one of fp8 rows and one of fp8 blocks."""

    kind, name, unused = "huggingface", "made-up", ()

    def __init__(self, divisors: dict[str, float], activation: dict[str, float], key_heads: int = 2) -> None:
        self.made = tiny_config(key_heads)
        self.words: dict[str, tuple[torch.Tensor, ...]] = {}
        self.tensors: dict[str, SourceTensor] = {}
        generator = torch.Generator().manual_seed(5)
        with torch.device("meta"):
            state = LlamaForCausalLM(self.made).state_dict()
        for name, tensor in state.items():
            shape = tuple(tensor.shape)
            values = torch.randn(shape, generator=generator)

            def read(begin: int, end: int, values: torch.Tensor = values) -> torch.Tensor:
                return values[begin:end]

            if not name.endswith("_proj.weight"):
                self.tensors[name] = SourceTensor(name, shape, "fp32", read)
            elif "down" in name:
                self.tensors[name] = SourceTensor(name, shape, "fp8_e4m3fn_block", read)
            elif "o_proj" in name:
                codes = torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=generator)
                self._encode(name, shape, read, (codes, torch.rand(shape[0], generator=generator).bfloat16()))
            else:
                codes = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8, generator=generator)
                scales = torch.randint(1, 0x7F, (shape[0], shape[1] // 16), dtype=torch.uint8, generator=generator)
                extras = {"divisor": divisors.get(name, 2.0), "activation_divisor": activation.get(name)}
                self._encode(name, shape, read, (codes, scales), **extras)

    def _encode(
        self, name: str, shape: tuple[int, ...], read: Any, words: tuple[torch.Tensor, ...], **extras: Any
    ) -> None:
        self.words[name] = words
        encoding = "nvfp4" if extras else "fp8_e4m3fn_row_bf16"

        def read_words(begin: int, end: int) -> tuple[torch.Tensor, ...]:
            return tuple(word[begin:end] for word in words)

        self.tensors[name] = SourceTensor(name, shape, encoding, read, read_words=read_words, **extras)

    def config(self) -> LlamaConfig:
        return self.made

    def resources(self) -> dict[str, bytes]:
        return {}

    def provenance(self) -> dict[str, Any]:
        return {"kind": self.kind}


def tiny_config(key_heads: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=key_heads,
        head_dim=128,
        vocab_size=32,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )


@pytest.mark.parametrize("divisors", [{}, {"k": 3.0}])
def test_encoded_matrices_keep_their_words_policies_and_divisors(tmp_path: Path, divisors: dict[str, float]) -> None:
    names = {which: f"model.layers.0.self_attn.{which}_proj.weight" for which in "qkvo"}
    activation = {names["k"]: 8.0, names["v"]: 5.0, names["q"]: 7.0}
    source = EncodedSource({names[which]: divisor for which, divisor in divisors.items()}, activation)

    def group(model: Any, recipe: Recipe, sources: Any) -> None:
        recipe.group([KEY, VALUE])
        recipe.use(QUERY, f"{QUERY.removesuffix('.weight')}/input", auxiliaries={"activation_input_divisor": 4})

    report = convert(source, tmp_path / "a.ninfer", "keep", recipe=group)
    with open_artifact(tmp_path / "a.ninfer") as artifact:
        for object_id in artifact.objects:
            artifact.read_object(object_id, check=True)
        parent = artifact.objects["weight/000000"]
        assert (parent.format, parent.shape, parent.divisors) == ("nvfp4", (512, 256), 1 + len(divisors))
        for which, divisor in (("k", divisors.get("k", 2.0)), ("v", 2.0), ("q", 2.0)):
            codes, scales = source.words[names[which]]
            pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()
            values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[pairs & 7] * (1 - 2 * (pairs >> 3))
            natural = scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, dim=1)
            found = artifact.dequantize_parameter(f"text/{names[which]}")
            torch.testing.assert_close(found, values * natural / divisor, rtol=1e-6, atol=0)
            use = artifact.use(f"text/{names[which]}", f"text/{names[which].removesuffix('.weight')}/input")
            assert use.activation_policy == "AllowA4"
            stored = artifact.auxiliary(use.parameter, use.input, "activation_input_divisor")
            assert stored.item() == (4.0 if which == "q" else 5.0)  # the smallest of a parent's sources serves them all
        codes, scales = source.words[names["o"]]
        expected = codes.view(torch.float8_e4m3fn).float() * scales.float().unsqueeze(1)
        assert torch.equal(artifact.dequantize_parameter(f"text/{names['o']}"), expected)
        policies = {use.parameter: use.activation_policy for use in artifact.uses}
        assert policies[f"text/{names['o']}"] == "AllowA8" and policies[GATE] == policies[DOWN] == "A16Only"
        assert artifact.parameter(DOWN).format == "fp8_e4m3fn_row_bf16"
    (fallback,) = report.fallbacks
    assert fallback.parameters == (DOWN,) and "fp8_e4m3fn_block" in fallback.note


def test_parents_of_many_divisors_need_equal_rows() -> None:
    def group(model: Any, recipe: Recipe, sources: Any) -> None:
        recipe.group([QUERY, KEY])

    name = QUERY.removeprefix("text/")
    assert plan(EncodedSource({name: 3.0}, {}), "keep", recipe=group).tasks[0].divisors == 2
    assert plan(EncodedSource({}, {}, key_heads=1), "keep", recipe=group).tasks[0].divisors == 1
    with pytest.raises(ConversionError, match=r"different divisors have \[256, 128\] rows"):
        plan(EncodedSource({name: 3.0}, {}, key_heads=1), "keep", recipe=group)


def test_four_bit_activations_need_a_divisor() -> None:
    with pytest.raises(ConversionError, match="allows 4-bit activations, .* neither the recipe nor the source"):
        plan(EncodedSource({}, {}), "keep", settings=[f"{GATE}=nvfp4::activation_policy=AllowA4"])
