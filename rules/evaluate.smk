"""evaluate: real speculative decoding of held-out prompts: acceptance, speed, and proof that the output is unchanged."""

# SGLang has no speculative decoding on a CPU; there the same drafter is evaluated with transformers.
EVALUATED_BY_SGLANG = SGLANG and GPUS > 0


rule evaluate:
    """The figures that decide whether a drafter is worth serving, on prompts that it was not trained on."""
    input:
        code=code("evaluate"),
        config=rules.train.output.config,
        weights=rules.train.output.weights,
        log=rules.train.output.log,
        manifest=results("shards/manifest.json"),
        shards=expand(results("shards/shard-{shard}.parquet"), shard=SHARDS),
        turn_format=results("target/turn_format.json"),
    output:
        acceptance=results("evaluation/acceptance.json"),
        table=results("evaluation/acceptance.csv"),
        speed=results("evaluation/speed.json"),
        plots=report(
            expand(results("evaluation/{plot}.png"), plot=PLOTS),
            caption="../docs/captions/evaluation.rst",
            category="Evaluation",
        ),
        provenance=results("provenance/evaluate/evaluate.json"),
    log:
        results("logs/evaluate.log"),
    benchmark:
        results("benchmarks/evaluate.jsonl")
    conda:
        "../envs/workflow.yaml"
    threads: cfg["resources"]["threads"]
    resources:
        server_tuning=as_json(only("server", *OWN_SERVER_TUNING)),
        gpu=GPUS,
        launcher="python scripts/evaluate.py" if EVALUATED_BY_SGLANG else launcher("evaluate"),
    params:
        evaluation=fixed(evaluation_params()),
        server=fixed(only("server", *OWN_SERVER) if EVALUATED_BY_SGLANG else {}),
        drafter=subpath(input.weights, parent=True),
        folder=subpath(output.acceptance, parent=True),
    shell:
        """
        {resources.launcher} \
            --drafter {params.drafter:q} \
            --manifest {input.manifest:q} \
            --shards {input.shards:q} \
            --turn-format {input.turn_format:q} \
            --params {params.evaluation:q} \
            --server {params.server:q} \
            --server-tuning {resources.server_tuning:q} \
            --output {params.folder:q} \
            --provenance {output.provenance:q} \
            2>&1 | tee {log:q}
        """
