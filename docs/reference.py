"""Generate the tables of configuration keys and recipes in docs/*.md from their definitions.

    python docs/reference.py

rewrites each part of a page between `<!-- generated: NAME -->` and `<!-- end -->`, and
`conf/parallelism/base.yaml`. Options of the strategy come from `lightning_3d.options`. Other types
come from the structured configurations (`lightning_3d.app.config.run_config` and the options of
launchers) and from the data modules. Defaults come from the files in `conf/`. Meanings are the
comments next to the keys there, or the `Attributes:` of a dataclass.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

DOCS = Path(__file__).parent
REPOSITORY = DOCS.parent
sys.path.insert(0, str(REPOSITORY))

from lightning_3d.app.cli.launch import KINDS  # noqa: E402
from lightning_3d.app.config.cluster import ClusterConfig  # noqa: E402
from lightning_3d.app.config.compose import compose  # noqa: E402
from lightning_3d.app.config.files import conf_folder, recipes_folder  # noqa: E402
from lightning_3d.app.config.lora import LoraOptions  # noqa: E402
from lightning_3d.app.config.objective import ObjectiveOptions  # noqa: E402
from lightning_3d.app.config.plan import PlanOptions  # noqa: E402
from lightning_3d.app.config.plan_run import check_keys  # noqa: E402
from lightning_3d.app.config.run_config import (  # noqa: E402
    MODEL_KEYS,
    PrecisionConfig,
    RunConfig,
    TrainerConfig,
    complete_run,
)
from lightning_3d.app.config.sample import SampleOptions  # noqa: E402
from lightning_3d.app.launchers.options import meanings  # noqa: E402
from lightning_3d.app.planner.advice import job_of, machine_of  # noqa: E402
from lightning_3d.app.planner.memory import memory_of  # noqa: E402
from lightning_3d.app.planner.step_time import step_of  # noqa: E402
from lightning_3d.app.runs.sweep.slurm_engine import SlurmResources  # noqa: E402
from lightning_3d.layout.layout import AXES  # noqa: E402
from lightning_3d.layout.resolve import resolve_layout  # noqa: E402
from lightning_3d.options.options import (  # noqa: E402
    COMMAND_LINE_DEFAULTS,
    Options,
    command_line_default,
    command_line_options,
)

BEGIN, END = "<!-- generated: {} -->", "<!-- end -->"
Row = tuple[str, str, str, str]
"""Key, type, default, meaning, as Markdown."""

# Types of values whose default is null and for which there is no dataclass.
NULLS = {
    "mtp_layers": "int",
    "mtp_loss_weight": "float",
    "fused": "bool",
    "decay_steps": "int",
    "cooldown_steps": "int",
    "groups": "list of dict",
    "active_parameters": "int",
    "jobs_at_once": "int",
    "metric": "str or list",
    "cpus_per_task": "int",
}


# Meanings


def comments(file: Path) -> dict[str, str]:
    """What a YAML file says of each of its keys: behind the key and on the lines below, or above
    the key.

    A key of which nothing is said has what is said of the one that it is in.
    """
    found: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    above: list[str] = []
    last, started = "", False  # comments before the first key are about the file
    for line in file.read_text("utf-8").splitlines():
        comment = re.fullmatch(r"(\s*)# ?(.*)", line)
        key = re.match(r"(\s*)(?:- )?([\w.]+):(?:\s|$)", line)
        if comment and comment[1] and last:
            found[last] = f"{found.get(last, '')} {comment[2].strip()}".strip()
        elif comment and started:
            above.append(comment[2].strip())
        elif key:
            started = True
            indent = len(key[1])
            parents = [(at, name) for at, name in parents if at < indent]
            last = ".".join([*(name for _, name in parents), key[2]])
            parents.append((indent, key[2]))
            said = [*above, *re.findall(r"\s# (.*)$", line)]
            if said:
                found[last] = " ".join(said)
            above = []
    return found


def header(file: Path) -> str:
    """The comment at the top of a file."""
    lines: list[str] = []
    for line in file.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line[1:].strip())
    return " ".join("\n".join(lines).partition("\n\n")[0].split())


# Types and defaults


def type_name(hint: Any) -> str:
    """A type as one writes it on a command line."""
    if get_origin(hint) in (Union, types.UnionType):
        names = ["null" if part is type(None) else type_name(part) for part in get_args(hint)]
        return " or ".join(name for name in names if name != "path" or "str" not in names)
    kind = get_origin(hint) or hint
    if kind in (list, Sequence):
        return f"list of {type_name(get_args(hint)[0])}"
    return {"PathLike": "path"}.get(kind.__name__, kind.__name__)


def type_of(key: str, value: Any) -> str:
    """The type of a value that a file has."""
    if value is None or value == "???" or (isinstance(value, str) and value.startswith("${")):
        known = NULLS.get(key.rpartition(".")[2], "str")
        return known if value == "???" else f"{known} or null"
    if isinstance(value, list):
        return "list of " + type(value[0]).__name__ if value else "list"
    return type(value).__name__


def written(value: Any) -> str:
    """A default as it would be written on a command line."""
    if value is MISSING or value == "???":
        return "must be given"
    text = (
        yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    )
    return f"`{text.strip(chr(39))}`"


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots, and their values."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read(file: Path) -> dict[str, Any]:
    content = yaml.safe_load(file.read_text("utf-8"))
    return content or {}


# Tables


def table(rows: list[Row]) -> str:
    """A Markdown table of keys. Each must have a meaning.

    A type is named where the default does not show it.
    """
    for key, _, _, meaning in rows:
        if not meaning:
            raise SystemExit(
                f"{key} has no description: write a comment next to it in conf/, or an Attributes"
                " entry in its dataclass."
            )
    lines = []
    before = ("", "")
    for key, kind, default, meaning in rows:
        same = f"the same as `{before[0]}`" if meaning == before[1] else ended(escaped(meaning))
        cells = (f"`{key}`", with_type(kind, default), same)
        before = (before[0] if meaning == before[1] else key, meaning)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *lines])


def with_type(kind: str, default: str) -> str:
    """The default, with the type behind it if the default does not show it."""
    if default.startswith("`") and default != "`null`":
        return default
    shown = kind.replace(" or null", "").replace(" or ", "/")
    return f"{default} ({shown})" if shown != "str" else default


def table_of_new(rows: list[Row], name: str, seen: dict[tuple[str, str], str]) -> str:
    """A table of the keys that no earlier option has, and one line for those that one has.

    Args:
        rows: Keys of this option.
        name: This option.
        seen: Option that first had a key with a meaning. This one's keys are added.
    """
    new: list[Row] = []
    known: dict[str, list[str]] = {}
    for row in rows:
        key, _, default, meaning = row
        first = seen.setdefault((key, meaning), name)
        if first == name:
            new.append(row)
        else:
            known.setdefault(first, []).append(f"`{key}`{differing(default)}")
    parts = [f"As for {first}: {', '.join(keys)}." for first, keys in known.items()]
    return "\n\n".join(([table(new)] if new else []) + parts)


def differing(default: str) -> str:
    """A default behind the name of a key."""
    return f" ({default})" if default.startswith("`") and default != "`null`" else ""


def escaped(text: str) -> str:
    """Text for a cell: no bars, and angle brackets that are no tags."""
    return (
        re.sub(r"(?<!\.)\.$", "", re.sub(r"\bNone\b", "null", text))
        .replace("|", "\\|")
        .replace("<", "&lt;")
    )


def ended(text: str) -> str:
    """Text with a period at its end, if it has several sentences."""
    return f"{text}." if re.search(r"[\w)\]]\. \w", text) and not text.endswith(".") else text


def structured(group: str, kind: type, file: Path) -> str:
    """Keys of a group that has a dataclass and one file."""
    said, values, meant = comments(file), read(file), meanings(kind)
    rows: list[Row] = []
    for key, hint, default in leaves(kind):
        if not key.startswith("_"):
            value = dict(flat(values)).get(key, default)
            rows.append(
                (
                    f"{group}.{key}",
                    type_name(hint),
                    written(value),
                    said.get(key) or meant.get(key) or nested_meaning(kind, key),
                )
            )
    return table(rows)


def leaves(kind: type, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, type, default) of a dataclass, with those of the dataclasses in it."""
    hints = get_type_hints(kind)
    for option in fields(kind):
        hint = hints[option.name]
        if is_dataclass(hint):
            yield from leaves(hint, f"{prefix}{option.name}.")
        else:
            default = (
                option.default_factory() if callable(option.default_factory) else option.default
            )
            yield f"{prefix}{option.name}", hint, default


def nested_meaning(kind: type, key: str) -> str:
    """What the dataclass that is a field says of its own, after what is said of the field."""
    name, _, inner = key.partition(".")
    hint = get_type_hints(kind).get(name)
    if not inner or not is_dataclass(hint):
        return ""
    return ": ".join(
        filter(None, (meanings(kind).get(name, "").rstrip("."), meanings(hint).get(inner, "")))
    )


def parallelism() -> str:
    """Keys of the group `parallelism`, which are options of the strategy."""
    hints = get_type_hints(Options) | {"layout": str}
    return table(
        [
            (
                f"parallelism.{one.name}",
                type_name(hints[one.name]),
                written(command_line_default(one)),
                one.metadata["help"],
            )
            for one in command_line_options()
        ]
    )


def script_defaults() -> str:
    """Defaults on the command line that differ from those of a script, with the reasons."""
    scripts = {one.name: one.default for one in command_line_options()}
    lines = ["| option | command line | script | reason |", "|---|---|---|---|"]
    for name, (value, reason) in COMMAND_LINE_DEFAULTS.items():
        lines.append(f"| `{name}` | {written(value)} | `{scripts[name]}` | {reason} |")
    return "\n".join(lines)


BASE = conf_folder() / "parallelism" / "base.yaml"


def base_yaml() -> str:
    """The file of the group `parallelism`: the keys with their defaults and meanings."""
    lines = [
        (
            "# Defaults for every layout, written by `python docs/reference.py` from"
            " lightning_3d/options."
        ),
        (
            "# `parallelism=tp4_pp2_dp2` loads this file and sets `layout` to that name. Every"
            " valid layout name works and"
        ),
        (
            "# needs no file of its own. An app that builds its Trainer with Hydra uses"
            " parallelism@trainer.strategy=tp4_pp2_dp2."
        ),
        "_target_: lightning_3d.Lightning3DStrategy",
        "_convert_: all  # pass plain lists and dicts instead of OmegaConf containers",
    ]
    for one in command_line_options():
        value = written(command_line_default(one)).strip("`")
        key = f"{one.name}: {value}".ljust(27) + "  # "
        below = " " * 29 + "# "
        lines.append(
            fill(
                one.metadata["help"],
                100,
                initial_indent=key,
                subsequent_indent=below,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines) + "\n"


def by_option(group: str, types_of: Callable[[str], Mapping[str, str]]) -> str:
    """A table for each option of a group; options with the keys of one before have only what
    differs."""
    parts: list[str] = []
    seen: dict[str, dict[str, Any]] = {}
    described: dict[tuple[str, str], str] = {}
    for file in sorted((conf_folder() / group).glob("*.yaml")):
        values, said = dict(flat(read(file))), comments(file)
        like = (
            None
            if group == "data"
            else next((name for name, other in seen.items() if other.keys() == values.keys()), None)
        )
        parts.append(f"### {group}={file.stem}\n\n{header(file)}")
        if like:
            changed = {key: value for key, value in values.items() if value != seen[like][key]}
            pairs = ", ".join(
                f"`{group}.{key}={written(value)[1:]}" for key, value in changed.items()
            )
            parts.append(f"As `{group}={like}`, but {pairs}.")
            continue
        seen[file.stem] = values
        kinds = types_of(file.stem)
        rows = [
            (
                f"{group}.{key}",
                kinds.get(key) or type_of(key, value),
                written(value),
                said.get(key) or PLAIN.get(key, ""),
            )
            for key, value in values.items()
            if key != "name" or group != "data"
        ]
        parts.append(table_of_new(rows, f"`{group}={file.stem}`", described))
    return "\n\n".join(parts)


PLAIN = {
    "name": "adamw, cpu_adamw, sgd or muon",
    "lr": "learning rate after the warm-up",
    "betas": "decay rates of AdamW's two moments",
    "eps": "number that AdamW adds to its denominator",
    "weight_decay": (
        "weight decay of all parameters except those in `no_decay`. It is decoupled in AdamW and an"
        " L2 penalty in SGD"
    ),
    "momentum": "momentum of SGD",
    "nesterov": "true uses Nesterov momentum",
    "scheduler.warmup_steps": "steps over which the learning rate grows linearly to `lr`",
    "split": "split of the data set to train on",
    "text_column": "column with the text",
}
"""What is the same in every option of a group and is not repeated in their files."""


def types_of_data(name: str) -> dict[str, str]:
    """Types of the arguments of a data module."""
    from importlib import import_module

    from lightning_3d.app.training.data import DATA_MODULES

    module, kind = DATA_MODULES[name].split(":")
    return {
        key: type_name(hint)
        for key, hint in get_type_hints(getattr(import_module(module), kind).__init__).items()
    }


def model() -> str:
    """Keys of the group `model`: those of the main job's, of a mixture's, and those that every run
    has."""
    files = [
        conf_folder() / "config.yaml",
        conf_folder() / "model" / "mixtral_tiny.yaml",
        conf_folder() / "model" / "llama_tiny.yaml",
    ]
    of_run = {
        key.removeprefix("model."): text
        for key, text in comments(files[0]).items()
        if key.startswith("model.")
    }
    said = of_run | comments(files[1]) | comments(files[2])
    values = read(files[1]) | read(files[2])
    lora = {f"lora.{key}": (type_name(hint), default) for key, hint, default in leaves(LoraOptions)}
    rows: list[Row] = []
    for key in MODEL_KEYS:
        if key == "lora":
            rows += [
                (f"model.{name}", kind, written(default), said.get(name, ""))
                for name, (kind, default) in lora.items()
            ]
        elif key == "config":
            rows.append(("model.config", "dict", "option's", said.get("config", "")))
        else:
            default = "option's" if key in values else written(None)
            rows.append((f"model.{key}", type_of(key, values.get(key)), default, said.get(key, "")))
    return table(rows)


def run_keys() -> str:
    """Keys that are in no group."""
    said, values = comments(conf_folder() / "config.yaml"), read(conf_folder() / "config.yaml")
    hints = get_type_hints(RunConfig)
    rows = [
        (key, type_name(hints[key]), written(values[key]), said[key])
        for key in ("seed", "force", "profile", "run_folder")
    ]
    limits, reserve = get_type_hints(PlanOptions), flat({"plan": values["plan"]})
    rows += [
        (key, type_name(limits[key.partition(".")[2]]), written(value), said[key])
        for key, value in reserve
    ]
    aims = get_type_hints(ObjectiveOptions)
    objective = flat({"objective": values["objective"]})
    rows += [
        (key, type_name(aims[key.partition(".")[2]]), written(value), said[key])
        for key, value in objective
    ]
    texts = get_type_hints(SampleOptions)
    rows += [
        (key, type_name(texts[key.partition(".")[2]]), written(value), said[key])
        for key, value in flat({"sample": values["sample"]})
    ]
    size, ramp = "data.global_batch_size", "data.batch_ramp"
    rows.append((size, "int", written(dict(flat(values))[size]), said.get(size) or said["data"]))
    return table([*rows, (ramp, "mapping or null", "null", said[ramp])])


def options_of(group: str) -> str:
    """The options of a group, and what the top of each file says."""
    files = sorted((conf_folder() / group).glob("*.yaml"))
    return "\n".join(f"- `{group}={file.stem}`: {escaped(purpose(file))}" for file in files)


def purpose(file: Path) -> str:
    """The first sentence of a file, without the source of its sizes, which the file names."""
    return first_sentence(header(file)).partition(". Sizes from")[0]


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[a-z)\]])\. (?=[A-Z`])", text, maxsplit=1)[0].rstrip(".")


def objects(group: str, option: str) -> str:
    """Loggers or callbacks of an option: their classes."""
    file = conf_folder() / group / f"{option}.yaml"
    said = comments(file)
    rows = [
        f"| `{group}.{name}` | `{entry['_target_']}` | {escaped(said.get(name, ''))} |"
        for name, entry in read(file).items()
    ]
    return "\n".join(["| object | class | |", "|---|---|---|", *rows])


def launch() -> str:
    """Options of the launchers."""
    parts = []
    described: dict[tuple[str, str], str] = {}
    for options in dict.fromkeys(launcher.options for launcher in KINDS.values()):
        names = [name for name, launcher in KINDS.items() if launcher.options is options]
        meant = meanings(options)
        rows = [
            (f"launch.{key}", type_name(hint), written(value), meant.get(key, ""))
            for key, hint, value in leaves(options)
        ]
        keys = table_of_new(rows, f"`{names[0]}`", described)
        parts.append(f"### lightning-3d launch {' and '.join(names)}\n\n{keys}")
    return "\n\n".join(parts)


def hydra_launcher(name: str) -> str:
    """Keys of a launcher of sweeps."""
    file = conf_folder() / "hydra" / "launcher" / f"{name}.yaml"
    said = meanings(SlurmResources) | comments(file)
    rows = [
        (f"hydra.launcher.{key}", type_of(key, value), written(value), said.get(key, ""))
        for key, value in read(file).items()
        if not key.startswith("_")
    ]
    return f"{header(file)}\n\n{table(rows)}"


NAMED = r",? from (a token file|token files)|,? on (\d+|one) nodes? of 8 [AH]\d+( 80 GB)?"
"""What the name of a recipe, or the text above the table, says already."""


def recipes() -> str:
    """All recipes with the layout."""
    lines = ["| recipe | layout | what it does |", "|---|---|---|"]
    for file in sorted(recipes_folder().glob("*.yaml")):
        (layout,) = (
            entry["override /parallelism"]
            for entry in read(file)["defaults"]
            if isinstance(entry, Mapping) and "override /parallelism" in entry
        )
        text = re.sub(NAMED, "", first_sentence(header(file)))
        lines.append(f"| `{file.stem}` | `{layout}` | {escaped(text)} |")
    return "\n".join(lines)


PUBLISHED = {
    "llama3_1_405b_1024xh100": "43 % MFU on 8192 H100, tp8_pp16_dp64 (arXiv:2407.21783, table 4)",
    "deepseek_v3_1024xh100": "1297 tokens/s in FP8, tp2_pp8_dp64_ep64_vp4 (Megatron-Bridge 25.09)",
    "qwen3_235b_a22b_256xh100": (
        "1633 tokens/s in FP8, tp2_pp8_dp16_ep32_vp4 (Megatron-Bridge 26.02)"
    ),
    "gpt_oss_120b_64xh100": "5993 tokens/s, pp4_dp16_ep8 (Megatron-Bridge 26.02)",
    "gpt3_175b_384xa100": "76.8 s: 153 TFLOP/s with recomputation (arXiv:2104.04473, table 2)",
    "gpt_1t_3072xa100": "102.6 s: 163 TFLOP/s with recomputation (arXiv:2104.04473, table 1)",
    "qwen3_8b_yarn_finetune_128k_16xh100": "",
    "llama3_1_8b_yarn_finetune_1024k_64xh100": "",
}
"""Published measurements of the models of recipes."""


def predictions() -> str:
    """What the planner predicts of large recipes, next to what was published."""
    lines = [
        "| recipe | memory | seconds of a step | tokens/s of a GPU | MFU | published |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for name, published in PUBLISHED.items():
        run = complete_run(check_keys(compose([f"recipe={name}", "trainer.dry=true"])))
        options, machine = run.parallelism, machine_of(run.cluster, None)
        layout, schedule = resolve_layout(
            options.layout, options.schedule, options.vp, tuple(options.order or AXES)
        )
        assert machine is not None and options.micro_batch_size is not None
        job = job_of(run, run.precision.name, layout, schedule, options.micro_batch_size)
        seconds, share = step_of(job, machine).seconds, memory_of(job).total / machine.memory
        rate = job.seq * job.global_batch / seconds / machine.gpus
        used = rate * run.spec.flops_per_token(job.seq) / machine.peak
        lines.append(
            f"| `{name}` | {share:.0%} | {seconds:.3g} | {rate:,.0f} | {used:.0%} | {published} |"
        )
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "run": run_keys,
    "model": model,
    "models": lambda: options_of("model"),
    "data": lambda: by_option("data", types_of_data),
    "parallelism": parallelism,
    "script_defaults": script_defaults,
    "cluster": lambda: structured(
        "cluster", ClusterConfig, conf_folder() / "cluster" / "local.yaml"
    ),
    "clusters": lambda: options_of("cluster"),
    "optimizer": lambda: by_option("optimizer", lambda name: {}),
    "precision": lambda: structured(
        "precision", PrecisionConfig, conf_folder() / "precision" / "auto.yaml"
    ),
    "precisions": lambda: options_of("precision"),
    "trainer": lambda: structured(
        "trainer", TrainerConfig, conf_folder() / "trainer" / "default.yaml"
    ),
    "loggers": lambda: options_of("logger"),
    "debug": lambda: options_of("debug"),
    "hparams_search": lambda: options_of("hparams_search"),
    "callbacks": lambda: objects("callbacks", "default"),
    "launch": launch,
    "hydra/launcher": lambda: hydra_launcher("lightning_3d"),
    "hydra/launcher/slurm": lambda: hydra_launcher("slurm"),
    "recipes": recipes,
    "predictions": predictions,
}


def filled(page: str) -> str:
    """A page with what is generated in it."""
    begin, end = re.escape(BEGIN).replace(r"\{\}", r"([\w/]+)"), re.escape(END)

    def part(match: re.Match[str]) -> str:
        return f"{BEGIN.format(match[1])}\n\n{PARTS[match[1]]()}\n\n{END}"

    return re.sub(f"{begin}.*?{end}", part, page, flags=re.DOTALL)


def main() -> None:
    """Rewrite the pages that have generated parts, and the file of the group `parallelism`."""
    BASE.write_text(base_yaml(), encoding="utf-8")
    for page in sorted(DOCS.glob("*.md")):
        before = page.read_text("utf-8")
        after = filled(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"{page.relative_to(REPOSITORY)} rewritten")


if __name__ == "__main__":
    main()
