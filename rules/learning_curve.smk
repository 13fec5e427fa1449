"""learning_curve: would more training rows help?  Only when asked for (`snakemake learning_curve`)."""

SHARES = ["0.25", "0.5"]  # of the training rows; all of them are the run's own drafter


wildcard_constraints:
    share="|".join(SHARES),


use rule train as train_share with:
    output:
        config=results("learning_curve/{share}/drafter/config.json"),
        weights=results("learning_curve/{share}/drafter/model.safetensors"),
        log=results("learning_curve/{share}/drafter/log.jsonl"),
        report=results("learning_curve/{share}/drafter/report.json"),
        provenance=results("provenance/train/share-{share}.json"),
    log:
        results("logs/learning_curve/train-{share}.log"),
    benchmark:
        results("benchmarks/learning_curve/train-{share}.jsonl")
    params:
        drafter=share_params,


use rule evaluate as evaluate_share with:
    input:
        code=rules.evaluate.input.code,
        config=rules.train_share.output.config,
        weights=rules.train_share.output.weights,
        log=rules.train_share.output.log,
        manifest=rules.evaluate.input.manifest,
        shards=rules.evaluate.input.shards,
        turn_format=rules.evaluate.input.turn_format,
    output:
        acceptance=results("learning_curve/{share}/evaluation/acceptance.json"),
        table=results("learning_curve/{share}/evaluation/acceptance.csv"),
        speed=results("learning_curve/{share}/evaluation/speed.json"),
        plots=expand(results("learning_curve/{{share}}/evaluation/{plot}.png"), plot=PLOTS),
        provenance=results("provenance/evaluate/share-{share}.json"),
    log:
        results("logs/learning_curve/evaluate-{share}.log"),
    benchmark:
        results("benchmarks/learning_curve/evaluate-{share}.jsonl")
    params:
        evaluation=fixed({**evaluation_params(), "min_acceptance": None, "speed_rows": 1}),


rule learning_curve:
    """The drafters of a quarter and of half of the rows beside the run's own: was it worth capturing the rest?"""
    input:
        code=code("learning_curve"),
        reports=[
            *expand(rules.train_share.output.report, share=SHARES),
            rules.train.output.report,
        ],
        acceptance=[
            *expand(rules.evaluate_share.output.acceptance, share=SHARES),
            rules.evaluate.output.acceptance,
        ],
    output:
        figures=results("learning_curve/learning_curve.json"),
        table=results("learning_curve/learning_curve.csv"),
        plot=report(
            results("learning_curve/learning_curve.png"),
            caption="../docs/captions/learning_curve.rst",
            category="Learning curve",
        ),
        provenance=results("provenance/learning_curve/learning_curve.json"),
    log:
        results("logs/learning_curve/learning_curve.log"),
    conda:
        "../envs/workflow.yaml"
    params:
        folder=subpath(output.figures, parent=True),
    shell:
        """
        python scripts/learning_curve.py \
            --reports {input.reports:q} \
            --acceptance {input.acceptance:q} \
            --output {params.folder:q} \
            --provenance {output.provenance:q} \
            2>&1 | tee {log:q}
        """
