"""Commands that evaluate a model, use it, or turn it into another format.

The values an option chooses from stand here once more, as the modules that own them import torch; a test compares them.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from genomoe.cli.options import Device

app = typer.Typer()

ScoreName = Literal["llr", "marginal", "embedding", "jsd"]
WindowMode = Literal["centred", "block"]
DtypeName = Literal["float32", "bfloat16"]

StoredDtype = Annotated[DtypeName | None, typer.Option(help="Of the weights.", show_default="as stored")]
Model = Annotated[
    Path, typer.Option("--model", "-m", help="A run, its model/ folder, or a Hugging Face Mixtral folder.")
]
Dtype = Annotated[DtypeName | None, typer.Option(help="To compute in.", show_default="float32 on a CPU, else as saved")]
ReferenceFile = Annotated[
    Path,
    typer.Option("--reference", "-r", help="FASTA (plain or compressed) or GenBank; bundled:... also works."),
]
Window = Annotated[
    int | None,
    typer.Option(help="Bases the model reads around a variant.", show_default="512, or the context if shorter"),
]
Score = Annotated[ScoreName, typer.Option(help="docs/variants.md has formulas and signs.")]
Strands = Annotated[Literal["both", "fwd"], typer.Option(help="both: mean of the two strands.")]
Downstream = Annotated[
    int | None,
    typer.Option(help="Only so many bases from the first difference on count.", show_default="to the window's end"),
]


@app.command()
def evaluate(
    run_dir: Annotated[Path, typer.Argument(help="A run directory; with --data or --task also any model folder.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="Sequence file to score; may be repeated.", show_default="the run's held-out contigs"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens between windows; each base is scored once.", show_default="half the context"),
    ] = None,
    device: Device = "auto",
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
    score: Annotated[ScoreName, typer.Option(help="With --task.")] = "llr",
    window: Annotated[
        int | None,
        typer.Option(
            help="Tokens the model reads at once; with --task, bases around a variant.",
            show_default="the run's; for a model folder its context, at most 8,192",
        ),
    ] = None,
    window_mode: Annotated[WindowMode, typer.Option(help="With --task.")] = "centred",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="With --task: folder of the report.")] = None,
) -> None:
    """Bits per base on held-out contigs or files, beside baselines; with --task, how well scores tell labels apart.

    Example: genomoe evaluate runs/yeast --json

    Example: genomoe evaluate Genos-1.2B --data chr21.fa.gz
    """
    if task is not None and data:
        raise typer.BadParameter("--data is scored base by base and --task variant by variant: give one of them")
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

    run(run_dir, data=data or [], as_json=as_json, window=window, stride=stride, device=device)


@app.command()
def score(
    variants: Annotated[Path, typer.Argument(help="VCF or BCF (plain, gzip, bgzip), TSV, CSV or Parquet.")],
    reference: ReferenceFile,
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Ends in .vcf.gz, .vcf, .tsv, .tsv.gz or .parquet.")],
    score: Score = "llr",
    window: Window = None,
    window_mode: Annotated[WindowMode, typer.Option(help="block: neighbours share a window, faster.")] = "centred",
    strands: Strands = "both",
    downstream: Downstream = None,
    ref_mismatch: Annotated[
        Literal["error", "skip", "substitute"], typer.Option(help="Where REF is not what the reference has.")
    ] = "error",
    unknown_contig: Annotated[
        Literal["error", "skip"], typer.Option(help="Where the reference has no such contig.")
    ] = "error",
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
        Literal["bf16", "fp8", "mxfp8"], typer.Option(help="Of the experts' products; bf16: the weights' own dtype.")
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
    sequences: Annotated[
        Path, typer.Argument(help="FASTA, plain or compressed; without --window each record at most a context long.")
    ],
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Ends in .npz (whole records only), .parquet or .tsv.")],
    window: Annotated[
        int | None, typer.Option(min=1, help="A vector for every so many bases.", show_default="whole records")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Bases from one window's start to the next.", show_default="the window")
    ] = None,
    regions: Annotated[
        Path | None, typer.Option(help="BED file: only these intervals of the FASTA, on their strand.")
    ] = None,
    layer: Annotated[int, typer.Option(help="-1: last, after its norm; 0: the embedding; n: after layer n.")] = -1,
    pool: Annotated[Literal["mean", "max", "last", "none"], typer.Option(help="none: only .npz.")] = "mean",
    strands: Strands = "fwd",
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """A vector for each sequence, each window of them, or each interval of a BED file.

    Example: genomoe embed promoters.fa --model runs/yeast --out promoters.npz

    Example: genomoe embed genome.fa --model runs/yeast --window 512 --stride 256 --out windows.parquet
    """
    from genomoe.commands.embed import run

    run(
        sequences,
        model=model,
        out=out,
        window=window,
        stride=stride,
        regions=regions,
        layer=layer,
        pool=pool,
        strands=strands,
        device=device,
        dtype=dtype,
    )


@app.command()
def mutagenesis(
    interval: Annotated[str, typer.Argument(help="CONTIG:START-END, 1-based, inclusive.")],
    reference: ReferenceFile,
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Ends in .tsv, .csv or .parquet; .png draws the map.")],
    score: Score = "llr",
    window: Window = None,
    window_mode: Annotated[WindowMode, typer.Option(help="block: neighbours share a window.")] = "block",
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
    sequences: Annotated[
        Path, typer.Argument(help="FASTA, plain or compressed; without --window each record at most a context long.")
    ],
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Ends in .tsv, .csv or .parquet.")],
    window: Annotated[
        int | None, typer.Option(min=1, help="Read so many bases at a time.", show_default="whole records")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Which experts every base went to, layer by layer.

    Example: genomoe routing promoters.fa --model runs/yeast --out routing.parquet
    """
    from genomoe.commands.routing import run

    run(sequences, model=model, out=out, window=window, device=device, dtype=dtype)


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
