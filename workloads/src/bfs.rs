//! Breadth-first search, which computes the distance in edges from the first node of a graph to each node.

use crate::{Gpu, Grid, Params, Random, Results, Setup, Slot, Workload};
use anyhow::{Result, bail};
use std::collections::VecDeque;

/// Maximum number of edges per node. The mean is about half of this number.
const DEGREE: u32 = 8;
/// Level of an unreachable node.
const UNREACHED: u32 = u32::MAX;
const THREADS: u32 = 256;

/// A graph in compressed sparse row format.
#[derive(Debug)]
pub(crate) struct Bfs {
    /// Index of each node's first edge, and the end of the last node's edges.
    starts: Vec<u32>,
    /// Target node of each edge.
    edges: Vec<u32>,
}

impl Bfs {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        let (count, mut random) = (4096 * scale - 100, Random::new(seed));
        let (mut starts, mut edges) = (vec![0], Vec::new());
        for node in 0..count {
            // The first node always has edges, so the search reaches other nodes with any seed. Other nodes may have no
            // edges.
            let degree = if node == 0 { DEGREE } else { random.below(DEGREE + 1) };
            edges.extend((0..degree).map(|_| random.below(count)));
            starts.push(edges.len() as u32);
        }
        Self { starts, edges }
    }

    fn count(&self) -> usize {
        self.starts.len() - 1
    }

    fn levels(&self) -> Vec<u32> {
        let mut levels = vec![UNREACHED; self.count()];
        levels[0] = 0;
        let mut queue = VecDeque::from([0]);
        while let Some(node) = queue.pop_front() {
            for edge in self.starts[node]..self.starts[node + 1] {
                let to = self.edges[edge as usize] as usize;
                if levels[to] == UNREACHED {
                    levels[to] = levels[node] + 1;
                    queue.push_back(to);
                }
            }
        }
        levels
    }
}

impl Workload for Bfs {
    fn name(&self) -> &'static str {
        "bfs"
    }

    fn size(&self) -> String {
        format!("{} nodes, {} edges", self.count(), self.edges.len())
    }

    fn source(&self) -> &'static str {
        include_str!("kernels/bfs.sm20")
    }

    fn buffers(&self) -> Vec<Slot> {
        let mut first = vec![0; self.count()];
        first[0] = 1;
        let mut levels = vec![UNREACHED; self.count()];
        levels[0] = 0;
        vec![
            Slot::words("starts", &self.starts),
            Slot::words("edges", &self.edges),
            Slot::bytes("frontier", first.clone()),
            Slot::bytes("next", vec![0; self.count()]),
            Slot::bytes("visited", first),
            Slot::scratch("found", size_of::<u32>() as u64),
            Slot::words("levels", &levels).output(),
        ]
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let [starts, edges, frontier, next, visited, found, levels] = setup.buffers()?;
        let count = self.count() as u32;
        let grid = Grid::line(count, THREADS);
        let masks = Params::new().word(count).buffer(frontier).buffer(next).buffer(visited);
        let expand = masks.clone().buffer(levels).buffer(starts).buffer(edges);
        let advance = masks.buffer(found);
        // Each level contains at least one node, so the search ends within `count` iterations.
        for _ in 0..count {
            gpu.upload(found, 0, &[0; 4])?;
            setup.launch(gpu, "expand", grid, &expand, &[starts, edges, frontier, next, visited, levels])?;
            setup.launch(gpu, "advance", grid, &advance, &[frontier, next, visited, found])?;
            let mut any = [0; 4];
            gpu.download(found, 0, &mut any)?;
            if any == [0; 4] {
                return Ok(());
            }
        }
        bail!("the search found more levels than nodes")
    }

    fn check(&self, results: &Results) -> Result<u64> {
        results.same_words("levels", &self.levels())
    }
}
