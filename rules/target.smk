"""target: obtain the model, and learn from its tokenizer and template where a turn's parts begin and end."""

if EMBEDDED:

    rule target_model:
        """The embedded default has to be built: taught once, then kept in the store under its content key."""
        input:
            code=code("target"),
            template="config/chat_templates/smollm2-think.jinja",
            lessons=multiext("config/lessons/", "functions.py", "tools.yaml", "talk.yaml"),
        output:
            model=directory(results("target/model")),
            provenance=results("provenance/target/model.json"),
        log:
            results("logs/target/model.log"),
        benchmark:
            results("benchmarks/target/model.jsonl")
        conda:
            "../envs/workflow.yaml"
        threads: cfg["resources"]["threads"]
        params:
            target=fixed(only("target", "model")),
            store=STORE,
        shell:
            """
            python scripts/target.py model \
                --params {params.target:q} \
                --store {params.store:q} \
                --output {output.model:q} \
                --threads {threads} \
                --provenance {output.provenance:q} \
                2>&1 | tee {log:q}
            """


rule turn_format:
    """All later stages read the target's boundaries from here, never from a list of model names."""
    input:
        code=code("target"),
        model=target_files(),
    output:
        turn_format=results("target/turn_format.json"),
        provenance=results("provenance/target/turn_format.json"),
    log:
        results("logs/target/turn_format.log"),
    conda:
        "../envs/workflow.yaml"
    params:
        target=fixed({**cfg["target"], "model": target_folder()}),
        fingerprint=target_fingerprint,
    shell:
        """
        python scripts/target.py turn-format \
            --params {params.target:q} \
            --output {output.turn_format:q} \
            --provenance {output.provenance:q} \
            2>&1 | tee {log:q}
        """


rule check:
    """Nothing is generated: the config is checked, and what is known about the target's turns is shown."""
    input:
        turn_format=results("target/turn_format.json"),
    log:
        results("logs/target/check.log"),
    conda:
        "../envs/workflow.yaml"
    shell:
        "python scripts/check.py --turn-format {input.turn_format:q} 2>&1 | tee {log:q}"
