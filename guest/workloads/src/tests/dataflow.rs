//! Gdev's data-flow programs (figure 11): graphs of matrix operations in which each node has its own context. A node's
//! result passes to the next node through CPU memory, or through a segment that both nodes attach.
//!
//! The measured time starts when the inputs are in CPU memory, and ends when the result is in CPU memory. Contexts are
//! created before the measurement.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use workloads::{Buffer, Gpu, Grid, Module, NodeKernel, Params, Place, Random};

use super::Facts;
use crate::compute::{self, Guest};
use crate::marks::Marks;
use crate::options::Options;
use crate::rig::{Counts, Rig};
use gdev::nouveau::Device;
use gdev::nouveau::Done;
use gdev::{Image, Segment, SegmentRequest};

/// Maximum number of contexts. Nodes take turns using them.
const MOST_CONTEXTS: u64 = 32;

/// Input of a node: an input of the graph, or the output of a node in the previous level.
#[derive(Debug, Clone, Copy)]
enum From {
    Input(usize),
    Node(usize),
}

/// Levels of nodes. Each node has two inputs.
struct Graph {
    levels: Vec<Vec<[From; 2]>>,
    inputs: usize,
}

impl Graph {
    /// Creates a graph in which each node combines two outputs of the previous level, down to a single node.
    fn tree(leaves: usize) -> Self {
        let mut levels = vec![(0..leaves).map(|at| [From::Input(2 * at), From::Input(2 * at + 1)]).collect::<Vec<_>>()];
        while levels.last().is_some_and(|level| level.len() > 1) {
            let width = levels[levels.len() - 1].len() / 2;
            levels.push((0..width).map(|at| [From::Node(2 * at), From::Node(2 * at + 1)]).collect());
        }
        Self { levels, inputs: 2 * leaves }
    }

    /// Creates a graph in which each node uses two adjacent nodes of the previous level. All levels have the same
    /// width.
    fn rectangle(depth: usize, width: usize) -> Self {
        let first = (0..width).map(|at| [From::Input(2 * at), From::Input(2 * at + 1)]).collect();
        let other = || (0..width).map(|at| [From::Node(at), From::Node((at + 1) % width)]).collect();
        let levels = std::iter::once(first).chain((1..depth).map(|_| other())).collect();
        Self { levels, inputs: 2 * width }
    }
}

/// A context on its own open device, with the loaded program and the buffers of a node.
struct Node {
    gpu: Guest,
    module: Module,
    buffers: [Buffer; 3],
}

impl Node {
    fn new(path: &Path, kernel: NodeKernel, bytes: u64) -> Result<Self> {
        let device = Device::open(path)?;
        let mut gpu = compute::measuring(&device)?;
        let module = gpu.load(Image::Sm20(&kernel.program()?))?;
        let mut buffer = || gpu.allocate(Place::Vram, bytes);
        let buffers = [buffer()?, buffer()?, buffer()?];
        gpu.finish()?;
        Ok(Self { gpu, module, buffers })
    }

    fn launch(&mut self, kernel: NodeKernel, side: u32, [a, b, c]: [Buffer; 3]) -> Result<()> {
        let (params, grid): (Params, Grid) = kernel.launch(side, a, b, c);
        self.gpu.launch(self.module, kernel.name(), grid, &params, &[a, b, c])?;
        Ok(())
    }
}

/// Runs `dataflow [--shape tree|rectangle] [--kernel madd|mmul] [--side N] [--contexts N] [--share] [--marks]`.
pub fn run(rig: &Rig, options: &Options) -> Result<Facts> {
    let shape = options.text("shape").unwrap_or("tree");
    let graph = match shape {
        "tree" => Graph::tree(32),
        "rectangle" => Graph::rectangle(6, 10),
        other => bail!("--shape {other}: tree or rectangle"),
    };
    let name = options.text("kernel").unwrap_or("madd");
    let kernel = NodeKernel::named(name).with_context(|| format!("--kernel {name}: madd or mmul"))?;
    let side = u32::try_from(options.number("side", 64)?)?;
    ensure!(side > 0 && side.is_multiple_of(16) && side <= workloads::MOST_SIDE, "--side {side}: a multiple of 16");
    let contexts = options.number("contexts", 8)?;
    ensure!((1..=MOST_CONTEXTS).contains(&contexts), "--contexts {contexts}: from 1 to {MOST_CONTEXTS}");
    let path = Path::new(options.text("node").unwrap_or(crate::DEFAULT_NODE));
    let bytes = u64::from(side) * u64::from(side) * 4;
    let shared = options.flag("share");

    let mut random = Random::new(rig.seed());
    let marks = Marks::new(options.flag("marks"));
    marks.at("begin", "")?;
    let inputs: Vec<Vec<u32>> = (0..graph.inputs).map(|_| random.words((bytes / 4) as usize)).collect();
    let mut nodes = (0..contexts).map(|_| Node::new(path, kernel, bytes)).collect::<Result<Vec<_>>>()?;
    marks.at("ready", &said(&nodes))?;
    let began = Instant::now();
    let by = if shared { by_segments } else { by_copies };
    let outputs = by(&graph, kernel, side, &inputs, &mut nodes)?;
    let took = began.elapsed();
    marks.at("done", &said(&nodes))?;
    let expected = on_the_cpu(&graph, kernel, side, &inputs);
    let mut verified = 0;
    for (index, (output, expected)) in outputs.iter().zip(&expected).enumerate() {
        verified += workloads::compare_words(&format!("output {index}"), output, expected)?;
    }
    ensure!(outputs.len() == expected.len(), "{} outputs instead of {}", outputs.len(), expected.len());
    let copies = nodes.iter().map(|node| node.gpu.backend().done().copies).sum();
    rig.add(Counts { bytes: verified, copies, channels: contexts });
    let gpu: u128 = nodes.iter().map(|node| node.gpu.backend().done().gpu_time.as_micros()).sum();
    Ok(vec![
        ("shape", shape.to_owned()),
        ("kernel", name.to_owned()),
        ("side", side.to_string()),
        ("nodes", graph.levels.iter().map(Vec::len).sum::<usize>().to_string()),
        ("shared", shared.to_string()),
        ("makespan_us", took.as_micros().to_string()),
        ("gpu_us", gpu.to_string()),
    ])
}

/// Returns the text of a mark: the numbers of bytes that the CPU has copied and that the card has copied over the link,
/// for all nodes so far.
fn said(nodes: &[Node]) -> String {
    let sum = |of: fn(&Done) -> u64| nodes.iter().map(|node| of(&node.gpu.backend().done())).sum::<u64>();
    format!("cpu_bytes={} link_bytes={}", sum(|done| done.cpu_bytes), sum(|done| done.link_bytes))
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

fn raw(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn by_copies(
    graph: &Graph,
    kernel: NodeKernel,
    side: u32,
    inputs: &[Vec<u32>],
    nodes: &mut [Node],
) -> Result<Vec<Vec<u32>>> {
    let count = nodes.len();
    let mut before: Vec<Vec<u32>> = Vec::new();
    for level in &graph.levels {
        let mut outputs = Vec::new();
        for (index, sources) in level.iter().enumerate() {
            let node = &mut nodes[index % count];
            for (source, buffer) in sources.iter().zip(node.buffers) {
                let data = match source {
                    From::Input(at) => &inputs[*at],
                    From::Node(at) => &before[*at],
                };
                node.gpu.upload(buffer, 0, &raw(data))?;
            }
            node.launch(kernel, side, node.buffers)?;
            let mut data = vec![0; node.buffers[2].bytes as usize];
            node.gpu.download(node.buffers[2], 0, &mut data)?;
            outputs.push(words(&data));
        }
        before = outputs;
    }
    Ok(before)
}

fn by_segments(
    graph: &Graph,
    kernel: NodeKernel,
    side: u32,
    inputs: &[Vec<u32>],
    nodes: &mut [Node],
) -> Result<Vec<Vec<u32>>> {
    let (count, bytes) = (nodes.len(), u64::from(side) * u64::from(side) * 4);
    let mut before: Vec<Segment> = Vec::new();
    for level in &graph.levels {
        let mut outputs = Vec::new();
        for (index, sources) in level.iter().enumerate() {
            let node = &mut nodes[index % count];
            let mut attached = Vec::new();
            let mut buffers = node.buffers;
            for (source, buffer) in sources.iter().zip(&mut buffers) {
                match source {
                    From::Input(at) => node.gpu.upload(*buffer, 0, &raw(&inputs[*at]))?,
                    From::Node(at) => {
                        *buffer = node.gpu.attach(before[*at], true)?;
                        attached.push(*buffer);
                    }
                }
            }
            let output = node.gpu.segment(SegmentRequest::create(0, bytes))?;
            buffers[2] = node.gpu.attach(output, false)?;
            attached.push(buffers[2]);
            node.launch(kernel, side, buffers)?;
            attached.into_iter().try_for_each(|memory| node.gpu.detach(memory))?;
            outputs.push(output);
        }
        for segment in before {
            nodes[0].gpu.remove(segment)?;
        }
        before = outputs;
    }
    let gpu = &mut nodes[0].gpu;
    let mut results = Vec::new();
    for segment in before {
        let memory = gpu.attach(segment, true)?;
        let mut data = vec![0; bytes as usize];
        gpu.download(memory, 0, &mut data)?;
        gpu.detach(memory)?;
        gpu.remove(segment)?;
        results.push(words(&data));
    }
    Ok(results)
}

fn on_the_cpu(graph: &Graph, kernel: NodeKernel, side: u32, inputs: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let mut before: Vec<Vec<u32>> = Vec::new();
    for level in &graph.levels {
        let data = |source: From| match source {
            From::Input(at) => &inputs[at],
            From::Node(at) => &before[at],
        };
        before = level.iter().map(|[a, b]| kernel.on_the_cpu(side, data(*a), data(*b))).collect();
    }
    before
}
