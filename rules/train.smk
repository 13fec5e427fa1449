"""train: the EAGLE-3 drafter, from the shards and the stored hidden states, and the script that serves it."""


rule train:
    """Resumes from a checkpoint in results/store/checkpoints/ when it was stopped."""
    input:
        code=code("train"),
        manifest=results("shards/manifest.json"),
        shards=expand(results("shards/shard-{shard}.parquet"), shard=SHARDS),
        indexes=expand(results("hidden/shard-{shard}.index.parquet"), shard=SHARDS),
        turn_format=results("target/turn_format.json"),
    output:
        config=results("drafter/config.json"),
        weights=results("drafter/model.safetensors"),
        log=results("drafter/log.jsonl"),
        report=results("drafter/report.json"),
        provenance=results("provenance/train/train.json"),
    log:
        results("logs/train.log"),
    benchmark:
        results("benchmarks/train.jsonl")
    conda:
        "../envs/workflow.yaml"
    threads: cfg["resources"]["threads"]
    resources:
        train_tuning=as_json(only("drafter", "checkpoint_every")),
        gpu=GPUS,
        launcher=launcher("train", every_gpu=True),
    params:
        drafter=fixed(drafter_params()),
        store=STORE,
        folder=subpath(output.config, parent=True),
    shell:
        """
        {resources.launcher} \
            --manifest {input.manifest:q} \
            --shards {input.shards:q} \
            --indexes {input.indexes:q} \
            --turn-format {input.turn_format:q} \
            --params {params.drafter:q} \
            --tuning {resources.train_tuning:q} \
            --store {params.store:q} \
            --output {params.folder:q} \
            --provenance {output.provenance:q} \
            2>&1 | tee {log:q}
        """


rule serve_script:
    """Beside the weights, because that folder is what is taken away; apart from them, because a server's flag trains nothing."""
    input:
        code=code("serve_script"),
        turn_format=results("target/turn_format.json"),
    output:
        serve=results("drafter/serve.sh"),
        provenance=results("provenance/train/serve_script.json"),
    log:
        results("logs/serve_script.log"),
    conda:
        "../envs/workflow.yaml"
    params:
        evaluation=fixed(only("evaluation", "draft_tokens", "tree")),
        server=fixed(only("server", *OWN_SERVER) if SGLANG else {}),
    shell:
        """
        python scripts/serve_script.py \
            --turn-format {input.turn_format:q} \
            --params {params.evaluation:q} \
            --server {params.server:q} \
            --output {output.serve:q} \
            --provenance {output.provenance:q} \
            2>&1 | tee {log:q}
        """
