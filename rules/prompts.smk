"""prompts: a dataset's records in one shape, deduplicated, each dropped one counted."""


rule prompts:
    """One dataset has one file, so that an edit of one leaves the others alone."""
    input:
        code=code("prompts"),
        source=dataset_source,
    output:
        prompts=results("prompts/{dataset}.jsonl"),
        report=results("prompts/{dataset}.report.json"),
        provenance=results("provenance/prompts/{dataset}.json"),
    log:
        results("logs/prompts/{dataset}.log"),
    conda:
        "../envs/workflow.yaml"
    params:
        dataset=dataset_params,
        store=STORE,
    shell:
        """
        python scripts/prompts.py \
            --dataset {wildcards.dataset} \
            --params {params.dataset:q} \
            --store {params.store:q} \
            --output {output.prompts:q} \
            --report {output.report:q} \
            --provenance {output.provenance:q} \
            2>&1 | tee {log:q}
        """
