"""generate: every token as the target wrote it, asked for once, kept in a journal that outlives the job."""


rule generate:
    """The expensive stage.  Its rows live in results/store/generations/, so a rerun asks only for what is missing."""
    input:
        code=code("generate"),
        prompts=results("prompts/{dataset}.jsonl"),
        turn_format=results("target/turn_format.json"),
        endpoint=[] if cfg["server"]["url"] else results("endpoints/{dataset}.json"),
    output:
        raw=results("raw/{dataset}.parquet"),
        report=results("raw/{dataset}.report.json"),
        provenance=results("provenance/generate/{dataset}.json"),
    log:
        results("logs/generate/{dataset}.log"),
    benchmark:
        results("benchmarks/generate/{dataset}.jsonl")
    conda:
        "../envs/workflow.yaml"
    threads: 1  # the client waits most of the time; datasets that are captured together fill the server's batch
    resources:
        client_tuning=as_json(only("server", *CLIENT_TUNING)),
    params:
        generate=generate_params,
        store=STORE,
        server=server_option,
    shell:
        """
        python scripts/generate.py \
            --dataset {wildcards.dataset} \
            --prompts {input.prompts:q} \
            --turn-format {input.turn_format:q} \
            {params.server} \
            --params {params.generate:q} \
            --tuning {resources.client_tuning:q} \
            --store {params.store:q} \
            --output {output.raw:q} \
            --report {output.report:q} \
            --provenance {output.provenance:q} \
            2>&1 | tee {log:q}
        """
