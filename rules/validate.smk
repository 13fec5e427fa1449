"""validate: each row's token boundaries are checked before it can reach a shard."""


rule validate:
    """A systematic fault must stop the run here, not be found in a drafter that accepts nothing."""
    input:
        code=code("validate"),
        raw=results("raw/{dataset}.parquet"),
        prompts=results("prompts/{dataset}.jsonl"),
        turn_format=results("target/turn_format.json"),
    output:
        checked=results("checked/{dataset}.parquet"),
        quarantine=results("quarantine/{dataset}.parquet"),
        report=results("checked/{dataset}.report.json"),
        provenance=results("provenance/validate/{dataset}.json"),
    log:
        results("logs/validate/{dataset}.log"),
    conda:
        "../envs/workflow.yaml"
    threads: 1  # it uses a second core if one is free; waiting for one until other datasets are captured would find a fault late
    params:
        validation=fixed(cfg["validation"]),
    shell:
        """
        python scripts/validate.py \
            --dataset {wildcards.dataset} \
            --raw {input.raw:q} \
            --prompts {input.prompts:q} \
            --turn-format {input.turn_format:q} \
            --params {params.validation:q} \
            --checked {output.checked:q} \
            --quarantine {output.quarantine:q} \
            --report {output.report:q} \
            --provenance {output.provenance:q} \
            2>&1 | tee {log:q}
        """
