"""hidden_states: what the drafter reads, the target's three auxiliary layers and its last, for every token."""

SGLANG_STATES = cfg["hidden_states"]["backend"] == "sglang"


rule hidden_states:
    """Rows are stored under their content in results/store/hidden/; a shard whose rows are all there loads no model."""
    input:
        code=code("hidden_states"),
        shard=results("shards/shard-{shard}.parquet"),
        turn_format=results("target/turn_format.json"),
    output:
        index=results("hidden/shard-{shard}.index.parquet"),
        report=results("hidden/shard-{shard}.report.json"),
        provenance=results("provenance/hidden_states/shard-{shard}.json"),
    log:
        results("logs/hidden_states/shard-{shard}.log"),
    benchmark:
        results("benchmarks/hidden_states/shard-{shard}.jsonl")
    conda:
        "../envs/workflow.yaml"
    threads: cfg["resources"]["threads"]
    resources:
        hidden_tuning=as_json(only("hidden_states", "batch_tokens") | only("sampling", "temperature")),
        server_tuning=as_json(only("server", *OWN_SERVER_TUNING)),
        gpu=GPUS,
        # SGLang takes the GPUs itself, so its job must not hold them.
        launcher="python scripts/hidden_states.py" if SGLANG_STATES else launcher("hidden_states"),
    params:
        hidden_states=fixed(without("hidden_states", "batch_tokens")),
        server=fixed(only("server", *OWN_SERVER) if SGLANG_STATES else {}),
        store=STORE,
    shell:
        """
        {resources.launcher} \
            --shard {input.shard:q} \
            --turn-format {input.turn_format:q} \
            --params {params.hidden_states:q} \
            --tuning {resources.hidden_tuning:q} \
            --server {params.server:q} \
            --server-tuning {resources.server_tuning:q} \
            --store {params.store:q} \
            --index {output.index:q} \
            --report {output.report:q} \
            --provenance {output.provenance:q} \
            2>&1 | tee {log:q}
        """
