"""merge: all datasets' checked rows, shuffled into shards by their ids."""


rule merge:
    """A row's shard and place follow from its id alone, so an edited row moves no other."""
    input:
        code=code("merge"),
        checked=expand(results("checked/{dataset}.parquet"), dataset=DATASETS),
    output:
        shards=expand(results("shards/shard-{shard}.parquet"), shard=SHARDS),
        manifest=results("shards/manifest.json"),
        provenance=results("provenance/merge/merge.json"),
    log:
        results("logs/merge.log"),
    conda:
        "../envs/workflow.yaml"
    params:
        merge=fixed({"shards": cfg["shards"], "heldout": cfg["heldout"]}),
        folder=subpath(output.manifest, parent=True),
    shell:
        """
        python scripts/merge.py \
            --checked {input.checked:q} \
            --params {params.merge:q} \
            --output {params.folder:q} \
            --provenance {output.provenance:q} \
            2>&1 | tee {log:q}
        """
