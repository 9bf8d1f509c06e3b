"""What is said of single published cases, in both languages of the documentation.

``CONTRADICTED``: the published outcome is not what follows from what the source states; it is said, never bent to.
``CORRECTED``: what a record said was not what its own source says.
"""

CONTRADICTED: dict[str, dict[str, str]] = {
    "hf4bit-7b-int8-1024": {
        "en": "512 tokens go through on the same card; with checkpointing 512 more take under 1 GiB, not the 6 left",
        "zh": "同一张卡上 512 个 token 能跑通；有检查点时再加 512 个只需不到 1 GiB，而不是剩下的 6 GiB",
    },
    "hf4bit-13b-nf4-1024-gc": {
        "en": "goes through with nested scales, which save 0.5 GiB; of 14.75 GiB a third is unaccounted for",
        "zh": "用嵌套缩放（省 0.5 GiB）就能跑通；14.75 GiB 中有三分之一说不清去向",
    },
    "oom-lf-4199": {
        "en": "failed after 300 steps with 8-bit states too, which are 10 GiB less: not by a step of the example's 1,024 tokens",
        "zh": "换成少 10 GiB 的 8 位状态后，300 步之后仍然失败：不是示例中 1,024 个 token 的一步造成的",
    },
    "oom-lf-4642": {
        "en": "rows of one length leave 12 GiB; of eight orders of rows of all lengths one fails: places of 18.6 GiB are cut up",
        "zh": "等长的行还剩 12 GiB；各种长度的行按八种顺序重放，有一种失败：18.6 GiB 的连续空间被切碎",
    },
    "oom-lf-5977-offload": {
        "en": "about 13 GB is the driver's view after rows of all lengths and evaluation; tensors take 5.5",
        "zh": "约 13 GB 是驱动在各种长度的行与评估之后看到的数；张量只占 5.5",
    },
    "llmem-opt-2.7b-4dp": {
        "en": "0.4 GiB short of the card, with Gemini's chunks, what fills them up, and places that the load has cut up",
        "zh": "离显卡容量还差 0.4 GiB，已计入 Gemini 的块、块的填充，以及加载过程切碎的空间",
    },
    "llmem-bloom-3b-2dp2tp": {
        "en": "0.7 GiB short of the card while the whole model is loaded, which four tensor parallel ranks do as well, and run",
        "zh": "加载整个模型时离显卡容量还差 0.7 GiB；四路张量并行同样这样加载，却能跑通",
    },
}
CORRECTED: dict[str, dict[str, str]] = {
    "qwen-72b-lora-emb-zero3-oom": {
        "en": "ZeRO 2, all weights on each card, instead of 3: the README rules 3 out where embeddings are trained",
        "zh": "是 ZeRO 2（每张卡持有全部权重）而不是 3：README 说训练词嵌入时不能用 3",
    },
    "oom-lf-6999": {
        "en": "seven cards instead of eight: the configuration quoted in the report",
        "zh": "七张卡而不是八张：报告中引用的配置如此",
    },
    "oom-s1-106": {
        "en": "a 7B model without checkpointing and 16,541 rows, instead of a 32B one with it and 32,768; inferred: the traces run in "
        "nika-7b by a script whose line for checkpointing is commented out, and the loss asked for 9.37 GiB",
        "zh": "是没有检查点的 7B 模型、16,541 行，而不是有检查点的 32B、32,768 行；推断依据：堆栈位于 nika-7b，"
        "所用脚本中检查点一行被注释掉，而损失申请了 9.37 GiB",
    },
    "oom-dscoder-78": {
        "en": "batch 1, 4,096 tokens, plain attention, where nothing was stated; inferred: 3.50 GiB were asked for, the fp32 weights of "
        "56 heads over 4,096 × 4,096",
        "zh": "批大小 1、4,096 个 token、普通注意力，原记录未写；推断依据：申请的 3.50 GiB 正是 56 个头在 4,096 × 4,096 上的 fp32 权重",
    },
}
