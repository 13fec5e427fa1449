"""audit: the chain of digests from every row of every shard back to its source, recomputed and told as one page."""


rule audit:
    """Fails when a file was changed behind the workflow's back, or a row is unaccounted for."""
    input:
        code=code("audit"),
        template="scripts/eaglet/report.html.jinja",
        provenance=[
            rules.turn_format.output.provenance,
            *([rules.target_model.output.provenance] if EMBEDDED else []),
            *expand(rules.prompts.output.provenance, dataset=DATASETS),
            *expand(rules.generate.output.provenance, dataset=DATASETS),
            *expand(rules.validate.output.provenance, dataset=DATASETS),
            rules.merge.output.provenance,
            *expand(rules.hidden_states.output.provenance, shard=SHARDS),
            rules.serve_script.output.provenance,
            rules.train.output.provenance,
            rules.evaluate.output.provenance,
        ],
    output:
        lineage=results("audit/lineage.json"),
        report=results("audit/report.html"),
        crate=results("audit/ro-crate-metadata.json"),
        provenance=results("provenance/audit/audit.json"),
    log:
        results("logs/audit.log"),
    conda:
        "../envs/workflow.yaml"
    params:
        config=fixed(untuned()),
        run=subpath(output.lineage, ancestor=2),
        folder=subpath(output.lineage, parent=True),
    shell:
        """
        python scripts/audit.py build \
            --run-dir {params.run:q} \
            --config-json {params.config:q} \
            --output {params.folder:q} \
            --provenance {output.provenance:q} \
            2>&1 | tee {log:q}
        """
