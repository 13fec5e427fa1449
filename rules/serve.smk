"""serve: the inference server, without a reasoning parser, as a lease that several datasets share."""

if not cfg["server"]["url"]:

    rule serve:
        """One lease for each dataset: with one service for all, an edit of one dataset would generate all of them again."""
        input:
            code=code("serve"),
            turn_format=results("target/turn_format.json"),
        output:
            endpoint=service(results("endpoints/{dataset}.json")),
        log:
            results("logs/serve/{dataset}.log"),
        conda:
            "../envs/workflow.yaml"
        threads: 0
        resources:
            serve_tuning=as_json(only("server", *SERVER_TUNING) | {"threads": cfg["resources"]["threads"]}),
            gpu=GPUS,
        params:
            server=fixed(only("server", *SERVER_SEMANTICS)),
            server_log=results("logs/server.log"),
        message:
            server_message()
        shell:
            """
            exec python scripts/serve.py hold \
                --when-wanted \
                --endpoint {output.endpoint:q} \
                --turn-format {input.turn_format:q} \
                --params {params.server:q} \
                --tuning {resources.serve_tuning:q} \
                --log {params.server_log:q} \
                2>{log:q}
            """
