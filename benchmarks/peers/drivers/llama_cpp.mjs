// llama.cpp through node-llama-cpp, whose package ships the binary: all sequences of one context, decoded in one batch.
// Speaks the protocol of protocol.py; see there.

import fs from "node:fs";
import {createRequire} from "node:module";
import path from "node:path";
import {pathToFileURL} from "node:url";
import readline from "node:readline";

const require = createRequire(path.join(process.cwd(), "package.json"));
const entry = pathToFileURL(require.resolve("node-llama-cpp")).href;
let llama, loaded, settings, context, made;
let sequences = [];

async function load(question) {
    const {getLlama, LlamaLogLevel} = await import(entry);
    settings = {...question, threads: question.options.threads ?? question.threads};
    llama = await getLlama({
        gpu: false, build: "never", maxThreads: settings.threads, logLevel: LlamaLogLevel.error, progressLogs: false
    });
    loaded = await llama.loadModel({modelPath: settings.model, gpuLayers: 0});
    const packaged = JSON.parse(fs.readFileSync(path.join(process.cwd(), "node_modules/node-llama-cpp/package.json")));
    return {versions: {node: process.version, "node-llama-cpp": packaged.version, "llama.cpp": llama.llamaCppRelease.release}};
}

// A context holds room for all its sequences at full length, so there is one for each kind of workload, one at a time.
async function ready({num_requests, num_tokens}) {
    const wanted = `${num_requests} × ${num_tokens}`;
    if (made === wanted)
        return {};
    await context?.dispose();
    made = undefined;
    const cache = settings.precision === "fp32" ? {experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32"} : {};
    context = await loaded.createContext({
        sequences: num_requests,
        contextSize: num_tokens,
        batchSize: settings.options.batch_size ?? 2048,
        threads: {ideal: settings.threads, min: settings.threads},
        ignoreMemorySafetyChecks: true,
        ...cache
    });
    sequences = Array.from({length: num_requests}, () => context.getSequence());
    made = wanted;
    return {};
}

async function continued(sequence, prompt, length) {
    const tokens = [];
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        tokens.push(token);
        if (tokens.length === length)
            break;
    }
    return tokens;
}

async function run({prompts, output_len}) {
    await Promise.all(sequences.map((sequence) => sequence.clearHistory()));
    const start = process.hrtime.bigint();
    const tokens = await Promise.all(prompts.map((prompt, index) => continued(sequences[index], prompt, output_len)));
    return {wall_s: Number(process.hrtime.bigint() - start) / 1e9, tokens};
}

const commands = {load, ready, run};
for await (const line of readline.createInterface({input: process.stdin})) {
    const {do: name, ...rest} = JSON.parse(line);
    let reply;
    try {
        reply = {reply: name, ...await commands[name](rest)};
    } catch (error) {
        reply = {reply: "error", message: `${error?.name ?? "Error"}: ${error?.message ?? error}`};
    }
    process.stdout.write(JSON.stringify(reply) + "\n");
}
process.exit(0);
