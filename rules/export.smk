"""export: the shards and hidden states in the formats of other trainers; only when asked for (`snakemake export`)."""


rule export_format:
    """One folder for each format, with the norm and the layer names that its readers expect but do not check."""
    input:
        code=code("export"),
        shards=expand(results("shards/shard-{shard}.parquet"), shard=SHARDS),
        indexes=expand(results("hidden/shard-{shard}.index.parquet"), shard=SHARDS),
        drafter=rules.train.output.weights,
        turn_format=results("target/turn_format.json"),
    output:
        folder=directory(results("export/{format}")),
        provenance=results("provenance/export/{format}.json"),
    log:
        results("logs/export/{format}.log"),
    wildcard_constraints:
        format="|".join(EXPORTS),
    conda:
        "../envs/workflow.yaml"
    params:
        drafter=subpath(input.drafter, parent=True),
        store=STORE,
    shell:
        """
        python scripts/export.py \
            --format {wildcards.format} \
            --shards {input.shards:q} \
            --indexes {input.indexes:q} \
            --turn-format {input.turn_format:q} \
            --drafter {params.drafter:q} \
            --store {params.store:q} \
            --output {output.folder:q} \
            --provenance {output.provenance:q} \
            2>&1 | tee {log:q}
        """


rule export:
    input:
        expand(results("export/{format}"), format=EXPORTS),
