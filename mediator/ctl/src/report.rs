//! `mediatorctl sched report`: a chart of how virtual machines use an engine over time.
//!
//! The chart shows each VM's fraction of the engine's time in windows of 500 ms by default. It is modelled on figures 7
//! and 8 of GPUvm (Suzuki et al., USENIX ATC 2014) and figures 14 to 16 of Gdev (Kato et al., USENIX ATC 2012).

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::{
    AreaSeries, Cartesian2d, ChartBuilder, ChartContext, Color, DrawingArea, IntoDrawingArea, LineSeries, RGBColor,
    Rectangle, SVGBackend, Text, WHITE,
};
use sched::Engine;
use serde::Serialize;

use api::SchedulerHistory;

/// Colours that most people can distinguish (Okabe and Ito), used cyclically.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(86, 180, 233),
    RGBColor(120, 94, 60),
    RGBColor(90, 90, 90),
];

/// Width and minimum height of the chart, in pixels.
const PICTURE_SIZE_PX: (u32, u32) = (1100, 560);
/// Width of the legend on the right, in pixels.
const LEGEND: u32 = 300;
/// Maximum length of a name in the legend, in characters.
const NAME: usize = 20;
/// Height of a legend line, and of the space above the first line, in pixels.
const LINE: i32 = 20;
/// Font family of the text, available in every viewer.
const FONT: &str = "sans-serif";
/// Maximum number of windows in a chart.
const MAX_WINDOWS: u64 = 10_000;

/// Virtual machines' usage of an engine, in time windows.
#[derive(Clone, Debug, PartialEq)]
pub struct Uses {
    engine: Engine,
    window_ms: u64,
    /// Start of the first window in seconds relative to the end of the last window; negative.
    begin: f64,
    vms: Vec<VmUses>,
}

/// Usage by one virtual machine.
#[derive(Clone, Debug, PartialEq)]
struct VmUses {
    vm: String,
    entitled_percent: f64,
    /// Fraction of the engine's time in each window, in percent.
    percent: Vec<f64>,
}

/// A report as numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Path of the chart.
    pub file: String,
    /// Engine of the report.
    pub engine: Engine,
    /// Length of a window, in ms.
    pub window_ms: u64,
    /// Number of windows.
    pub windows: usize,
    /// Jain's index: 1 if all VMs with use received the same fraction of their entitlements. Absent if no VM used the
    /// engine.
    pub jain: Option<f64>,
    /// Shares of the virtual machines.
    pub vms: Vec<Received>,
}

/// Average share of the engine's time that a virtual machine received.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Received {
    /// Name of the virtual machine.
    pub vm: String,
    /// Share to which the virtual machine is entitled while all VMs have work, in percent.
    pub entitled_percent: f64,
    /// Share that the virtual machine received, in percent.
    pub received_percent: f64,
}

/// Returns the most used engine.
#[must_use]
pub fn busiest(history: &SchedulerHistory) -> Engine {
    let samples = || history.vms.iter().flat_map(|vm| &vm.samples);
    let used = |engine: &Engine| -> u128 {
        samples().filter_map(|sample| sample.used_ns.get(engine)).map(|used| u128::from(*used)).sum()
    };
    // If several engines were used equally, the first one wins.
    Engine::ALL.into_iter().rev().max_by_key(used).unwrap_or(Engine::Compute)
}

/// Returns Jain's fairness index: 1 for equal values, and 1/n if only one value is nonzero. Returns `None` if no value
/// is nonzero.
fn jain(values: &[f64]) -> Option<f64> {
    let (sum, squares) = values.iter().fold((0.0, 0.0), |(sum, squares), value| (sum + value, squares + value * value));
    (squares > 0.0).then(|| sum * sum / (values.len() as f64 * squares))
}

impl Uses {
    /// Summarizes a history in whole windows of `window_ms` milliseconds, counted back from the end of the last
    /// complete interval to the first use.
    ///
    /// # Errors
    /// Returns an error if the window is not a multiple of the history's interval or is longer than the report, or if
    /// there are too many windows.
    pub(crate) fn from_history(history: &SchedulerHistory, engine: Engine, window_ms: u128) -> Result<Self, String> {
        let interval_ms = history.interval_ms.max(1);
        let window_ms = u64::try_from(window_ms).unwrap_or(u64::MAX);
        if window_ms == 0 || !window_ms.is_multiple_of(interval_ms) || window_ms > history.since_ms {
            let most = history.since_ms;
            return Err(format!(
                "a window of {window_ms} ms, expected a multiple of {interval_ms} ms, at most the {most} ms of the report"
            ));
        }
        let (interval, window) = (interval_ms.saturating_mul(1_000_000), window_ms.saturating_mul(1_000_000));
        let end = history.now_ns - history.now_ns % interval;
        let earliest = end.saturating_sub(history.since_ms.saturating_mul(1_000_000));
        let samples = || history.vms.iter().flat_map(|vm| &vm.samples);
        let first = samples().map(|sample| sample.from_ns).min().unwrap_or(earliest).clamp(earliest, end);
        // Count whole windows from the end.
        let windows = ((end - first) / window).max(1);
        if windows > MAX_WINDOWS {
            return Err(format!("{windows} windows, expected at most {MAX_WINDOWS}; choose a longer window"));
        }
        // PANIC: the value is at most MAX_WINDOWS.
        let count = windows as usize;
        let vms = history.vms.iter().map(|vm| {
            let mut percent = vec![0.0; count];
            for sample in &vm.samples {
                let back = end.checked_sub(sample.from_ns.saturating_add(1)).map(|back| back / window);
                let place = back.and_then(|back| count.checked_sub(1 + usize::try_from(back).ok()?));
                if let Some(place) = place.and_then(|place| percent.get_mut(place)) {
                    *place += sample.used_ns.get(&engine).copied().unwrap_or(0) as f64 / window as f64 * 100.0;
                }
            }
            let of_copies = vm.copies_entitled_permille.filter(|_| engine != Engine::Compute);
            let entitled = of_copies.unwrap_or(vm.entitled_permille);
            VmUses { vm: vm.vm.clone(), entitled_percent: f64::from(entitled) / 10.0, percent }
        });
        let begin = -(windows as f64 * window as f64) / 1e9;
        Ok(Self { engine, window_ms, begin, vms: vms.collect() })
    }

    /// Returns the report as numbers.
    #[must_use]
    pub fn summary(&self, file: &str) -> Summary {
        Summary {
            file: file.to_owned(),
            engine: self.engine,
            window_ms: self.window_ms,
            windows: self.windows(),
            jain: self.jain(),
            vms: self.vms.iter().map(VmUses::received).collect(),
        }
    }

    fn windows(&self) -> usize {
        self.vms.iter().map(|vm| vm.percent.len()).max().unwrap_or(0)
    }

    /// Returns Jain's index of the ratio of received to entitled share, over the virtual machines that used the engine.
    fn jain(&self) -> Option<f64> {
        let received = self.vms.iter().map(VmUses::received);
        let used = received.filter(|vm| vm.received_percent > 0.0 && vm.entitled_percent > 0.0);
        jain(&used.map(|vm| vm.received_percent / vm.entitled_percent).collect::<Vec<_>>())
    }

    /// Draws the chart, with lines or stacked areas.
    ///
    /// # Errors
    /// Returns the reason if the chart cannot be drawn.
    pub fn svg(&self, card: &str, stacked: bool) -> Result<String, String> {
        let mut text = String::new();
        let lines = u32::try_from(self.vms.len()).unwrap_or(u32::MAX).saturating_add(3);
        let height = lines.saturating_mul(LINE.unsigned_abs()).max(PICTURE_SIZE_PX.1);
        let area = SVGBackend::with_string(&mut text, (PICTURE_SIZE_PX.0, height)).into_drawing_area();
        self.draw(&area, card, stacked).map_err(|error| error.to_string())?;
        drop(area);
        Ok(text)
    }

    fn draw<'a>(
        &self,
        area: &DrawingArea<SVGBackend<'a>, Shift>,
        card: &str,
        stacked: bool,
    ) -> Result<(), Box<dyn std::error::Error + 'a>> {
        area.fill(&WHITE)?;
        let jain = self.jain().map_or_else(|| "-".to_owned(), |index| format!("{index:.3}"));
        let (engine, window) = (self.engine.name(), self.window_ms);
        let title = format!("{card}, {engine}: use in windows of {window} ms, Jain's index {jain}");
        let (plot, legend) = area.titled(&title, (FONT, 20))?.split_horizontally(PICTURE_SIZE_PX.0 - LEGEND);
        let layers = self.layers(stacked);
        let peak = layers.iter().flatten().copied().fold(100.0, f64::max);
        let mut chart = ChartBuilder::on(&plot)
            .margin(14)
            .x_label_area_size(42)
            .y_label_area_size(56)
            .build_cartesian_2d(self.begin..0.0, 0.0..peak)?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .label_style((FONT, 13))
            .axis_desc_style((FONT, 14))
            .x_desc("seconds before the report")
            .y_desc("% of the engine's time")
            .draw()?;
        // Draw the uppermost layer first, so that the lower ones cover it.
        for (index, layer) in layers.iter().enumerate().rev() {
            self.draw_vm(&mut chart, index, layer, stacked)?;
        }
        for ((vm, colour), line) in self.vms.iter().zip(COLOURS.iter().cycle()).zip(1i32..) {
            let Received { vm, entitled_percent, received_percent } = vm.received();
            let vm = if vm.chars().count() > NAME {
                format!("{}...", vm.chars().take(NAME).collect::<String>())
            } else {
                vm
            };
            let label = format!("{vm}: {received_percent:.1} % (entitled {entitled_percent:.1} %)");
            let y = line * LINE;
            legend.draw(&Rectangle::new([(0, y), (16, y + 10)], colour.filled()))?;
            legend.draw(&Text::new(label, (24, y), (FONT, 13)))?;
        }
        area.present()?;
        Ok(())
    }

    /// Returns the heights to draw: each virtual machine's use, or its sum with the preceding ones.
    fn layers(&self, stacked: bool) -> Vec<Vec<f64>> {
        let mut below = vec![0.0; self.windows()];
        let heights = self.vms.iter().map(|vm| {
            if !stacked {
                return vm.percent.clone();
            }
            below.iter_mut().zip(&vm.percent).for_each(|(below, percent)| *below += percent);
            below.clone()
        });
        heights.collect()
    }

    fn draw_vm<'a>(
        &self,
        chart: &mut ChartContext<'_, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>,
        index: usize,
        heights: &[f64],
        stacked: bool,
    ) -> Result<(), Box<dyn std::error::Error + 'a>> {
        let colour = COLOURS[index % COLOURS.len()];
        let window_s = self.window_ms as f64 / 1e3;
        // Draw steps, because a window's use is spread over the whole window.
        let step = |(at, height): (usize, &f64)| {
            let from = self.begin + at as f64 * window_s;
            [(from, *height), (from + window_s, *height)]
        };
        let points = heights.iter().enumerate().flat_map(step);
        if stacked {
            chart.draw_series(AreaSeries::new(points, 0.0, colour))?;
        } else {
            chart.draw_series(LineSeries::new(points, colour.stroke_width(2)))?;
        }
        Ok(())
    }
}

impl VmUses {
    fn received(&self) -> Received {
        let windows = self.percent.len().max(1) as f64;
        let received_percent = self.percent.iter().sum::<f64>() / windows;
        Received { vm: self.vm.clone(), entitled_percent: self.entitled_percent, received_percent }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::{UseSample, VmHistory};

    const INTERVAL_NS: u64 = 100_000_000;

    /// Returns the history of two VMs: `a` used 60 ms of each interval of the last second, and `b` used 30 ms of every
    /// other interval.
    fn history() -> SchedulerHistory {
        let sample = |index: u64, ns| UseSample {
            from_ns: 20_000_000_000 + index * INTERVAL_NS,
            used_ns: [(Engine::Compute, ns), (Engine::Copy0, 1000)].into(),
        };
        let a = (0..10).map(|index| sample(index, 60_000_000)).collect();
        let b = (0..10).step_by(2).map(|index| sample(index, 30_000_000)).collect();
        let vm = |vm: &str, entitled_permille, copies, samples| VmHistory {
            vm: vm.to_owned(),
            entitled_permille,
            copies_entitled_permille: copies,
            samples,
        };
        SchedulerHistory {
            card: "card0".to_owned(),
            now_ns: 21_000_000_000 + 7,
            since_ms: 5000,
            interval_ms: 100,
            vms: vec![vm("a", 800, Some(250), a), vm("b", 200, Some(750), b)],
        }
    }

    #[test]
    fn uses_are_summed_up_in_windows_from_the_first_use_on() {
        let uses = Uses::from_history(&history(), Engine::Compute, 500).unwrap();
        assert_eq!((uses.begin, uses.windows()), (-1.0, 2));
        let rounded = |vm: usize| uses.vms[vm].percent.iter().map(|percent| percent.round()).collect::<Vec<_>>();
        assert_eq!((rounded(0), rounded(1)), (vec![60.0, 60.0], vec![18.0, 12.0]));
        let uses = Uses::from_history(&history(), Engine::Compute, 100).unwrap();
        assert_eq!(uses.windows(), 10);
        assert_eq!(uses.vms[1].percent[..2], [30.0, 0.0]);
        // The VMs received 60 of 80 percent and 15 of 20 percent, three quarters of each entitlement.
        let summary = uses.summary("f");
        assert!((summary.jain.unwrap() - 1.0).abs() < 1e-9, "{summary:?}");
        assert!((summary.vms[1].received_percent - 15.0).abs() < 1e-9);
    }

    #[test]
    fn windows_are_whole_and_every_vm_has_a_line_in_the_legend() {
        let mut history = history();
        let first = history.vms[0].samples[0].clone();
        history.vms[0].samples.insert(0, UseSample { from_ns: first.from_ns - 3 * INTERVAL_NS, ..first });
        let uses = Uses::from_history(&history, Engine::Compute, 500).unwrap();
        assert_eq!((uses.begin, uses.windows()), (-1.0, 2), "data before the first whole window is omitted");
        history.vms = (0..64).map(|index| VmHistory { vm: format!("vm{index}"), ..history.vms[1].clone() }).collect();
        let svg = Uses::from_history(&history, Engine::Compute, 500).unwrap().svg("card0", false).unwrap();
        assert!(svg.contains("vm63: 15.0 %") && svg.contains("height=\"1340\""), "{svg}");
    }

    #[test]
    fn windows_that_do_not_fit_are_refused() {
        for ms in [0, 50, 150, 10_000, u128::MAX] {
            let error = Uses::from_history(&history(), Engine::Compute, ms).unwrap_err();
            assert!(error.contains("expected a multiple of 100 ms, at most the 5000 ms"), "{error}");
        }
    }

    #[test]
    fn jain_index_separates_equal_from_unequal_shares() {
        assert_eq!(jain(&[]), None);
        assert_eq!(jain(&[0.0, 0.0]), None);
        assert_eq!(jain(&[2.0, 2.0, 2.0]), Some(1.0));
        assert_eq!(jain(&[1.0, 0.0, 0.0, 0.0]), Some(0.25));
    }

    #[test]
    fn svg_report_is_self_contained_with_shares_and_fairness() {
        let history = history();
        assert_eq!(busiest(&history), Engine::Compute);
        for stacked in [false, true] {
            let uses = Uses::from_history(&history, Engine::Compute, 100).unwrap();
            let svg = uses.svg("card0", stacked).unwrap();
            assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
            for text in ["a: 60.0 % (entitled 80.0 %)", "b: 15.0 % (entitled 20.0 %)", "index 1.000", "card0, compute"]
            {
                assert!(svg.contains(text), "{text} in {svg}");
            }
            // The only URL is the format's namespace identifier.
            assert_eq!(svg.matches("://").count(), svg.matches("xmlns=\"http://www.w3.org/2000/svg\"").count());
            let lines = if stacked { "<polygon" } else { "<polyline" };
            assert!(svg.matches(lines).count() >= 2, "{svg}");
        }
    }

    #[test]
    fn nothing_used_is_a_picture_too() {
        let idle = SchedulerHistory { vms: Vec::new(), ..history() };
        let uses = Uses::from_history(&idle, busiest(&idle), 500).unwrap();
        assert_eq!(uses.summary("f").jain, None);
        assert!(uses.svg("card0", false).unwrap().contains("index -"));
        assert!(uses.svg("card0", true).is_ok());
    }

    #[test]
    fn use_beyond_a_window_is_within_the_picture() {
        let mut history = history();
        history.vms[0].samples[3].used_ns.insert(Engine::Compute, 400_000_000);
        let uses = Uses::from_history(&history, Engine::Compute, 100).unwrap();
        assert_eq!(uses.layers(true)[1][3], 400.0);
        assert!(uses.svg("card0", true).is_ok());
    }
}
