//! Tracks points on the wall of a heart through the frames of a film by template matching. Each template is compared
//! with the surroundings of its last position in the frame.

use crate::{Gpu, Grid, Params, Random, Results, Setup, Slot, Workload};
use anyhow::Result;

/// Number of frames. The points in the first frame are known.
const FRAMES: usize = 11;
/// Number of points on the inner wall (an ellipse) at scale 1.
const INNER: usize = 6;
/// Number of points on the outer wall (an ellipse) at scale 1.
const OUTER: usize = 9;
/// Side of a template in pixels.
const TEMPLATE: usize = 8;
/// Side of the search area in positions.
const PLACES: u32 = 8;
/// Number of threads per block, with one thread per position.
const THREADS: u32 = PLACES * PLACES;
/// Distance of a point from the first pixel of its search area, in pixels along each axis.
const MARGIN_BEFORE_PX: u32 = PLACES / 2;
/// Minimum distance of a point from the frame's far edges, in pixels.
const MARGIN_AFTER_PX: u32 = 12;
/// Motion of the scene per frame, in pixels.
const MOTION: [usize; 2] = [2, 1];
/// Number of different pixel values in the scene.
const SHADES: u32 = 240;
/// Number of different noise values.
const NOISE: u32 = 16;

/// A film of a moving scene.
#[derive(Debug)]
pub(crate) struct Heartwall {
    side: u32,
    /// All frames, concatenated.
    film: Vec<u32>,
    /// Column and row of each point in the first frame.
    points: Vec<[u32; 2]>,
}

impl Heartwall {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        let (side, mut random) = (crate::side(64, scale), Random::new(seed));
        let width = side as usize;
        let wide = width + FRAMES * MOTION[0];
        let scene: Vec<u32> = (0..wide * (width + FRAMES * MOTION[1])).map(|_| random.below(SHADES)).collect();
        let mut film = Vec::with_capacity(FRAMES * width * width);
        for frame in 0..FRAMES {
            for row in 0..width {
                let first = (row + frame * MOTION[1]) * wide + frame * MOTION[0];
                film.extend(scene[first..first + width].iter().map(|shade| shade + random.below(NOISE)));
            }
        }
        Self { side, film, points: points(side, scale as usize) }
    }

    fn frame(&self, index: usize) -> &[u32] {
        let pixels = self.film.len() / FRAMES;
        &self.film[index * pixels..(index + 1) * pixels]
    }

    /// Returns the initial templates, which are pixels of the first frame.
    fn templates(&self) -> Vec<u32> {
        let of = |[x, y]: [u32; 2]| self.patch(0, x, y);
        self.points.iter().flat_map(|&point| of(point)).collect()
    }

    fn patch(&self, frame: usize, x: u32, y: u32) -> Vec<u32> {
        let (frame, width) = (self.frame(frame), self.side as usize);
        let row = |row: usize| (y as usize + row) * width + x as usize;
        (0..TEMPLATE).flat_map(|at| frame[row(at)..row(at) + TEMPLATE].iter().copied()).collect()
    }
}

/// Returns points on both ellipses, well inside a frame.
fn points(side: u32, scale: usize) -> Vec<[u32; 2]> {
    let ellipse = |count: usize, part: f64| {
        let half = f64::from(side) / 2.0;
        let along = move |of: f64| (half + half * part * of) as u32;
        (0..count).map(move |at| {
            let (sine, cosine) = (at as f64 * std::f64::consts::TAU / count as f64).sin_cos();
            [along(cosine), along(sine * 0.8)].map(|place| place.clamp(MARGIN_BEFORE_PX, side - MARGIN_AFTER_PX))
        })
    };
    ellipse(INNER * scale, 0.35).chain(ellipse(OUTER * scale, 0.7)).collect()
}

/// The templates, positions and matches after a frame, as the kernel computes them.
struct Tracked {
    points: Vec<[u32; 2]>,
    templates: Vec<u32>,
    found: Vec<u32>,
}

impl Tracked {
    fn follow(&mut self, film: &Heartwall, frame: usize) {
        for (point, template) in self.points.iter_mut().zip(self.templates.chunks_mut(TEMPLATE * TEMPLATE)) {
            let [x, y] = point.map(|place| place - MARGIN_BEFORE_PX);
            let key = |place: u32| {
                let patch = film.patch(frame, x + place % PLACES, y + place / PLACES);
                let differs: u32 = patch.iter().zip(&*template).map(|(a, b)| a.abs_diff(*b).pow(2)).sum();
                differs * THREADS + place
            };
            let best = (0..THREADS).map(key).min().unwrap_or_default();
            self.found.push(best);
            let place = best % THREADS;
            let [x, y] = [x + place % PLACES, y + place / PLACES];
            let patch = film.patch(frame, x, y);
            template.iter_mut().zip(patch).for_each(|(pixel, seen)| *pixel = (3 * *pixel + seen) / 4);
            *point = [x, y].map(|place| place.clamp(MARGIN_BEFORE_PX, film.side - MARGIN_AFTER_PX));
        }
    }
}

impl Workload for Heartwall {
    fn name(&self) -> &'static str {
        "heartwall"
    }

    fn size(&self) -> String {
        format!("{FRAMES} frames of {0}x{0}, {1} points", self.side, self.points.len())
    }

    fn source(&self) -> &'static str {
        include_str!("kernels/heartwall.sm20")
    }

    fn buffers(&self) -> Vec<Slot> {
        let points: Vec<u32> = self.points.iter().flatten().copied().collect();
        let found = ((FRAMES - 1) * self.points.len() * size_of::<u32>()) as u64;
        vec![
            Slot::words("film", &self.film),
            Slot::words("points", &points).output(),
            Slot::words("templates", &self.templates()).output(),
            Slot::scratch("found", found).output(),
        ]
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let [film, points, templates, found] = setup.buffers()?;
        let words = |count: usize| (count * size_of::<u32>()) as u64;
        for frame in 1..FRAMES {
            let params = Params::new()
                .word(self.side)
                .address(film.address + words(frame * self.frame(0).len()))
                .buffer(points)
                .buffer(templates)
                .address(found.address + words((frame - 1) * self.points.len()));
            let grid = Grid::line(self.points.len() as u32 * THREADS, THREADS);
            setup.launch(gpu, "track", grid, &params, &[film, points, templates, found])?;
        }
        Ok(())
    }

    fn check(&self, results: &Results) -> Result<u64> {
        let mut tracked = Tracked { points: self.points.clone(), templates: self.templates(), found: Vec::new() };
        (1..FRAMES).for_each(|frame| tracked.follow(self, frame));
        let points: Vec<u32> = tracked.points.iter().flatten().copied().collect();
        Ok(results.same_words("found", &tracked.found)?
            + results.same_words("points", &points)?
            + results.same_words("templates", &tracked.templates)?)
    }
}
