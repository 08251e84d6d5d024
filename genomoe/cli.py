"""The `genomoe` command line: one Typer command a verb, each loading what it needs when it runs.

Nothing heavy is imported here, so that `genomoe --help` answers at once. Every failure ends as one sentence
on stderr and an exit code: 2 for a wrong command line, 1 for anything else, 130 when interrupted.
`--debug`, anywhere on the line, shows the traceback instead.
"""

import io
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from genomoe import __version__


class _Commands(TyperGroup):
    """Says that it was interrupted; Typer itself would end with code 130 and not a word."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            _fail(str(error) or "interrupted.", code=130)


app = typer.Typer(
    name="genomoe",
    cls=_Commands,
    help="Mixture-of-experts DNA language models: pretrain, fine-tune, score variants.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Hydra overrides, for example trainer.max_steps=20."),
]


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"genomoe {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (may stand anywhere).")
    ] = False,
) -> None:
    """Options before the command; `--debug` is taken off the line in `main`, so that it may stand anywhere."""


@app.command()
def pretrain(
    overrides: Overrides = None,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print the configuration and stop.")] = False,
) -> None:
    """Pretrain a model; without overrides a small one on three yeast chromosomes, on the CPU, in minutes.

    Example: genomoe pretrain trainer.max_steps=200 optim.learning_rate=1e-3 paths.run_dir=runs/short
    """
    from genomoe.commands.pretrain import run

    run(overrides or [], show_config=show_config)


@app.command()
def evaluate(
    run_dir: Annotated[Path, typer.Argument(help="A run directory; with --task also any model folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
    stride: Annotated[
        int | None,
        typer.Option(help="Bases between windows; each base is scored once.", show_default="half the context"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    task: Annotated[
        str | None,
        typer.Option(
            help="Labelled variants instead: table, clinvar, traitgym, brca1 or mitomap, the layout of --table."
        ),
    ] = None,
    table: Annotated[Path | None, typer.Option(help="With --task: the labelled file or folder.")] = None,
    reference: Annotated[Path | None, typer.Option("--reference", "-r", help="With --task: the genome.")] = None,
    annotation: Annotated[
        Path | None, typer.Option(help="With --task: GenBank, GFF3, GTF or BED for consequence classes.")
    ] = None,
    codon_table: Annotated[int, typer.Option(help="With --annotation: NCBI translation table.")] = 1,
    score: Annotated[str, typer.Option(help="With --task: llr, marginal, embedding or jsd.")] = "llr",
    window: Annotated[int | None, typer.Option(help="With --task: bases around a variant.")] = None,
    window_mode: Annotated[str, typer.Option(help="With --task: centred or block.")] = "centred",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="With --task: folder of the report.")] = None,
) -> None:
    """Bits per base on the held-out contigs beside baselines; with --task, how well scores tell labels apart.

    Example: genomoe evaluate runs/yeast --json
    """
    if task is not None:
        from genomoe.commands.evaluate_task import run as run_task

        run_task(
            run_dir,
            task=task,
            table=table,
            reference=reference,
            annotation=annotation,
            codon_table=codon_table,
            out=out,
            as_json=as_json,
            device=device,
            score=score,
            window=window,
            window_mode=window_mode,
        )
        return
    from genomoe.commands.evaluate import run

    run(run_dir, as_json=as_json, stride=stride, device=device)


@app.command()
def plan(
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
    gpu: Annotated[
        str | None,
        typer.Option(help="A GPU by name: h200, h100, b200, a100, l40s.", show_default="this machine's"),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.1, help="Memory of the device, GiB.", show_default="the GPU's")
    ] = None,
    find_context: Annotated[
        bool, typer.Option("--find-context", help="Longest window that fits, under every activation policy.")
    ] = False,
) -> None:
    """Parameters, FLOPs, predicted memory and step time of a configuration, without training it.

    Example: genomoe plan model=genos-1.2b precision=bf16 data.context_length=8192 data.batch_size=4 --gpu h200
    """
    from genomoe.commands.plan import run

    run(overrides or [], as_json=as_json, gpu=gpu, memory_gib=memory, find_context=find_context)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
) -> None:
    """What this machine can run, which backends are picked, and why not the others.

    Example: genomoe doctor
    """
    from genomoe.commands.doctor import run

    run(as_json=as_json)


StoredDtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.", show_default="as stored")]


@app.command("export")
def export_(
    model: Annotated[Path, typer.Argument(help="A run, or its model/ folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    dtype: StoredDtype = None,
) -> None:
    """Write a model as a Hugging Face Mixtral folder.

    Example: genomoe export runs/yeast --out yeast-mixtral
    """
    from genomoe.commands.convert import export

    export(model, out=out, dtype=dtype)


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face Mixtral folder with safetensors.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The model folder to write.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="How bases become ids: nucleotide, byte, kmer6, or a .json file.", show_default="as the folder says"
        ),
    ] = None,
    dtype: StoredDtype = None,
) -> None:
    """Turn a Hugging Face Mixtral folder into a model folder.

    Example: genomoe import yeast-mixtral --out yeast-again
    """
    from genomoe.commands.convert import import_

    import_(folder, out=out, tokenizer=tokenizer, dtype=dtype)


Model = Annotated[
    Path, typer.Option("--model", "-m", help="A run, its model/ folder, or a Hugging Face Mixtral folder.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.", show_default="float32 on a CPU, else as saved")]
ReferenceFile = Annotated[
    Path,
    typer.Option("--reference", "-r", help="FASTA (plain or compressed) or GenBank; bundled:... also works."),
]
Window = Annotated[
    int | None,
    typer.Option(help="Bases the model reads around a variant.", show_default="512, or the context if shorter"),
]
Score = Annotated[str, typer.Option(help="llr, marginal, embedding or jsd; docs/variants.md has formulas and signs.")]
Strands = Annotated[str, typer.Option(help="both (mean of the two strands) or fwd.")]
Downstream = Annotated[
    int | None,
    typer.Option(help="Only so many bases from the first difference on count.", show_default="to the window's end"),
]


@app.command()
def score(
    variants: Annotated[Path, typer.Argument(help="VCF or BCF (plain, gzip, bgzip), TSV, CSV or Parquet.")],
    reference: ReferenceFile,
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Ends in .vcf.gz, .vcf, .tsv, .tsv.gz or .parquet.")],
    score: Score = "llr",
    window: Window = None,
    window_mode: Annotated[str, typer.Option(help="centred, or block: neighbours share a window, faster.")] = "centred",
    strands: Strands = "both",
    downstream: Downstream = None,
    ref_mismatch: Annotated[str, typer.Option(help="error, skip or substitute.")] = "error",
    unknown_contig: Annotated[str, typer.Option(help="error or skip.")] = "error",
    contig_alias: Annotated[
        list[str] | None,
        typer.Option(help="FILE_NAME=REFERENCE_NAME, several times, or a two-column TSV file."),
    ] = None,
    info_key: Annotated[str, typer.Option(help="Name of the INFO field, in lower case of the column.")] = "GENOMOE",
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens of a batch.", show_default="by the device")] = None,
    batch_variants: Annotated[
        int | None,
        typer.Option(help="Variants of a batch; 1: bit for bit whatever else is in the file.", show_default="no limit"),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = None,
    precision: Annotated[
        str, typer.Option(help="Of the experts' products: bf16 (the weights' own dtype), fp8 or mxfp8.")
    ] = "bf16",
    restart: Annotated[bool, typer.Option("--restart", help="Forget an unfinished run of this output.")] = False,
) -> None:
    """Score every ALT of a variant file; a killed run goes on where it stopped.

    Example: genomoe score in.vcf.gz --reference ref.fa --model runs/yeast --out scored.vcf.gz
    """
    from genomoe.commands.score import run

    run(
        variants,
        reference=reference,
        model=model,
        out=out,
        contig_alias=contig_alias or [],
        info_key=info_key,
        device=device,
        dtype=dtype,
        precision=precision,
        restart=restart,
        window=window,
        score=score,
        window_mode=window_mode,
        strands=strands,
        downstream=downstream,
        ref_mismatch=ref_mismatch,
        unknown_contig=unknown_contig,
        batch_tokens=batch_tokens,
        batch_variants=batch_variants,
    )


@app.command()
def embed(
    sequences: Annotated[Path, typer.Argument(help="FASTA, plain or compressed, each record at most a context long.")],
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Ends in .npz, .parquet or .tsv.")],
    layer: Annotated[int, typer.Option(help="-1: last, after its norm; 0: the embedding; n: after layer n.")] = -1,
    pool: Annotated[str, typer.Option(help="mean, max, last, or none (only .npz).")] = "mean",
    strands: Strands = "fwd",
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """A vector for each sequence.

    Example: genomoe embed promoters.fa --model runs/yeast --out promoters.npz
    """
    from genomoe.commands.embed import run

    run(sequences, model=model, out=out, layer=layer, pool=pool, strands=strands, device=device, dtype=dtype)


@app.command()
def mutagenesis(
    interval: Annotated[str, typer.Argument(help="CONTIG:START-END, 1-based, inclusive.")],
    reference: ReferenceFile,
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Ends in .tsv, .csv or .parquet; .png draws the map.")],
    score: Score = "llr",
    window: Window = None,
    window_mode: Annotated[str, typer.Option(help="block or centred.")] = "block",
    strands: Strands = "both",
    downstream: Downstream = None,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Score every single-base change of an interval.

    Example: genomoe mutagenesis chrI:1,001-1,200 --reference ref.fa --model runs/yeast --out map.tsv
    """
    from genomoe.commands.mutagenesis import run

    run(
        interval,
        reference=reference,
        model=model,
        out=out,
        device=device,
        dtype=dtype,
        score=score,
        window=window,
        window_mode=window_mode,
        strands=strands,
        downstream=downstream,
    )


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Bases to go on from, or a FASTA file whose records are prompts.")],
    model: Model,
    n: Annotated[int, typer.Option("-n", "--tokens", help="Tokens to add.")] = 100,
    samples: Annotated[int, typer.Option(help="Continuations of each prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest base.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Only the k likeliest tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens of this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A FASTA file.", show_default="stdout")] = None,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Sample sequences that go on from a prompt.

    Example: genomoe generate ACGTTGCA --model runs/yeast -n 200 --samples 5 --temperature 0.8
    """
    from genomoe.commands.generate import run

    run(
        prompt,
        model=model,
        out=out,
        device=device,
        dtype=dtype,
        n=n,
        samples=samples,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )


@app.command()
def routing(
    sequences: Annotated[Path, typer.Argument(help="FASTA, plain or compressed, each record at most a context long.")],
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Ends in .tsv, .csv or .parquet.")],
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Which experts every base went to, layer by layer.

    Example: genomoe routing promoters.fa --model runs/yeast --out routing.parquet
    """
    from genomoe.commands.routing import run

    run(sequences, model=model, out=out, device=device, dtype=dtype)


@app.command()
def finetune(
    overrides: Overrides = None,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print the configuration and stop.")] = False,
) -> None:
    """Fine-tune a pretrained model on a labelled task, several seeds, and report beside baselines.

    Example: genomoe finetune task=sortseq model=runs/yeast seeds=[1,2,3]
    """
    from genomoe.commands.finetune import run

    run(overrides or [], show_config=show_config)


corpus = typer.Typer(help="Check, build and describe training corpora.", no_args_is_help=True)
app.add_typer(corpus, name="corpus")

CorpusInputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...", help="FASTA or GenBank files, folders, quoted globs, or one description (.yaml)."
    ),
]


@corpus.command("build")
def corpus_build(
    inputs: CorpusInputs,
    out: Annotated[Path, typer.Option("--out", "-o", help="The store to create, for example corpus.zarr.")],
    workers: Annotated[int, typer.Option(help="Processes.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing store.")] = False,
) -> None:
    """Turn sequence files into a Zarr store that streams fast.

    Example: genomoe corpus build genomes/ --out corpus.zarr --workers 4
    """
    from genomoe.commands.corpus import build

    build(inputs, out, workers=workers, overwrite=overwrite)


@corpus.command("validate")
def corpus_validate(
    inputs: CorpusInputs,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Check files (or a store) against every rule; prints file:line for each fault and exits 1 on an error.

    Example: genomoe corpus validate genomes/*.fa.gz
    """
    from genomoe.commands.corpus import validate

    raise typer.Exit(validate(inputs, as_json=as_json))


@corpus.command("describe")
def corpus_describe(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="A store (.zarr), or what `build` takes.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page here.")] = None,
) -> None:
    """Sizes, GC, N, soft-masking and duplicate contigs.

    Example: genomoe corpus describe corpus.zarr --report corpus.html
    """
    from genomoe.commands.corpus import describe

    describe(inputs, as_json=as_json, report=report)


@corpus.command("leakage")
def corpus_leakage(
    train: Annotated[list[str], typer.Argument(metavar="TRAIN...", help="The training files, description or store.")],
    held_out: Annotated[list[str], typer.Option("--held-out", help="What is held out; may be given several times.")],
    window: Annotated[int, typer.Option(help="Bases of a window.")] = 1000,
    threshold: Annotated[float, typer.Option(help="Part of a window's 21-mers that counts as the same.")] = 0.5,
    out: Annotated[Path | None, typer.Option(help="Write all windows here as TSV.")] = None,
) -> None:
    """Report held-out windows that nearly equal training sequence, on either strand; exits 1 when there is any.

    Example: genomoe corpus leakage train.zarr --held-out chr8.fa.gz
    """
    from genomoe.commands.corpus import leakage

    raise typer.Exit(leakage(train, held_out, window=window, threshold=threshold, out=out))


bench = typer.Typer(
    name="bench",
    help="Measure this machine; JSON and a table, with hardware and versions in it.",
    no_args_is_help=True,
)
app.add_typer(bench)

Out = Annotated[Path | None, typer.Option(help="Write the rows, hardware and versions here as JSON.")]
Only = Annotated[
    list[str] | None, typer.Option(help="Shell pattern of case names; may be repeated.", show_default="all")
]
Budget = Annotated[
    float | None,
    typer.Option(help="Seconds; cases that would not end in time are recorded as not run.", show_default="none"),
]
ListOnly = Annotated[bool, typer.Option("--list", help="Print the names of the cases and stop.")]


@bench.command("layer")
def bench_layer(
    out: Out = None,
    case: Only = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Shell pattern of implementation/precision/save; may be repeated.", show_default="all"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs, of which the median counts.")] = 7,
    limit_s: Annotated[int, typer.Option(min=1, help="Seconds an implementation may take for a case.")] = 120,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Compile SonicMoE's kernels for all cases first, at the same time.")
    ] = False,
) -> None:
    """One MoE layer, ours and every installed peer's: time, TFLOP/s, memory kept and at the peak, errors.

    Example: genomoe bench layer --case 'genos*' --out docs/results/layer-h200.json
    """
    from genomoe.commands.bench import run_layers

    run_layers(out=out, cases=case or [], only=only or [], repeats=repeats, limit_s=limit_s, prepare=prepare)


@bench.command("step")
def bench_step(
    out: Out = None,
    only: Only = None,
    time_budget: Budget = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cuda:N.")] = "auto",
    list_only: ListOnly = False,
) -> None:
    """Whole training steps at 8k, ours and Hugging Face's: tokens/s, MFU, peak memory.

    Example: genomoe bench step --only 'genos*' --out docs/results/step-h200.json
    """
    from genomoe.commands.bench import run_steps

    run_steps("step", out=out, only=only or [], time_budget=time_budget, device=device, list_only=list_only)


@bench.command("context")
def bench_context(
    out: Out = None,
    only: Only = None,
    time_budget: Budget = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cuda:N.")] = "auto",
    list_only: ListOnly = False,
) -> None:
    """Training steps on one sequence of 32k to 4M tokens, ours and Hugging Face's.

    Example: genomoe bench context --time-budget 300 --out docs/results/context-h200.json
    """
    from genomoe.commands.bench import run_steps

    run_steps("context", out=out, only=only or [], time_budget=time_budget, device=device, list_only=list_only)


@bench.command("precision")
def bench_precision(
    out: Out = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the loss curves here (PNG, PDF or SVG).")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each training.")] = 1000,
    seeds: Annotated[int, typer.Option(min=1, help="Initial weights a precision is trained from.")] = 3,
    train: Annotated[
        list[str] | None, typer.Option(help="FASTA file to train on; may be repeated.", show_default="two yeasts")
    ] = None,
    held_out: Annotated[
        list[str] | None, typer.Option(help="FASTA file to evaluate on; may be repeated.", show_default="a third")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="A toy model, to try the command on a CPU.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Loss of the same training with experts in bf16, fp8 and mxfp8, each from several initial weights.

    Example: genomoe bench precision --out docs/results/precision-h200.json --plot docs/results/precision-h200.png
    """
    from genomoe.commands.bench import run_precision

    sources = {name: tuple(paths) for name, paths in (("train", train), ("held_out", held_out)) if paths}
    run_precision(out=out, plot=plot, steps=steps, seeds=seeds, small=small, device=device, sources=sources)


@bench.command("loader")
def bench_loader(
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
    bases: Annotated[int, typer.Option(min=2_000_000, help="Size of the made-up genome.")] = 50_000_000,
    window: Annotated[
        list[int] | None,
        typer.Option(min=64, help="Window length; may be repeated.", show_default="1024, 8192, 131072, 1048576"),
    ] = None,
    workers: Annotated[
        list[int] | None, typer.Option(min=1, help="Loader processes; may be repeated.", show_default="1 and 2")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each row, of which the median counts.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.05, help="Length of one measurement.")] = 1.5,
) -> None:
    """Bases per second from disk to packed batches, beside pyfaidx, pysam, Biopython and a memory map.

    Example: genomoe bench loader --out docs/results/loader-cpu.json
    """
    from genomoe.commands.bench import run_loader

    run_loader(
        out=out,
        as_json=as_json,
        bases=bases,
        windows=window or (1024, 8192, 131_072, 1_048_576),
        workers=workers or (1, 2),
        repeats=repeats,
        seconds=seconds,
    )


@bench.command("scoring")
def bench_scoring(
    out: Out = None,
    only: Only = None,
    time_budget: Budget = None,
    device: Device = "auto",
    precision: Annotated[
        list[str] | None, typer.Option(help="Of our expert products: bf16 (the weights' own), fp8; may be repeated.")
    ] = None,
) -> None:
    """Variants per second, ours and a well-batched Hugging Face loop's with the same weights and windows.

    Example: genomoe bench scoring --device cpu --out docs/results/scoring-cpu.json
    """
    from genomoe.commands.bench import run_scoring

    run_scoring(out=out, only=only or [], time_budget=time_budget, device=device, precisions=precision or ["bf16"])


def main(arguments: list[str] | None = None) -> None:
    """Run the command line (`sys.argv[1:]` unless given) and exit; `sys.argv` itself is never changed."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets a question mark
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    usual_format, warnings.formatwarning = warnings.formatwarning, _format_warning
    try:
        app(args=arguments, prog_name="genomoe")
    except Exception as error:
        if debug:
            raise
        _fail(_sentence(error), code=1)
    finally:
        warnings.formatwarning = usual_format


def _format_warning(message: Warning | str, category: type[Warning], *_: Any) -> str:
    """A warning for the user as one line, without the line of code it came from."""
    return f"genomoe: warning: {' '.join(str(message).split())}\n"


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        return text if "install" in text else f"{text}; install the extra that brings it, see the README."
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    if isinstance(error, ValueError | OSError) and text:
        return text
    return f"unexpected {type(error).__name__}: {text} (run again with --debug for the traceback)"


def _fail(sentence: str, *, code: int) -> NoReturn:
    typer.echo(f"genomoe: {sentence}", err=True)
    raise SystemExit(code)
