//! Draws grouped bar charts as self-contained images.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::prelude::{
    ChartBuilder, Color, IntoDrawingArea, IntoFont, PathElement, RGBColor, Rectangle, SVGBackend, WHITE,
};
use plotters::style::{BLACK, FontTransform};

/// Colours that most people can distinguish (Okabe and Ito).
const COLOURS: [RGBColor; 9] = [
    RGBColor(150, 150, 150),
    RGBColor(0, 0, 0),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(240, 228, 66),
    RGBColor(204, 121, 167),
];
/// Height of the image in pixels.
const HEIGHT: u32 = 480;
/// Width of a group in pixels.
const GROUP: u32 = 62;
/// Fraction of a group's width covered by bars.
const FILLED: f64 = 0.84;

/// A data series with one bar per group.
pub struct Kind {
    /// Name in the legend.
    pub name: String,
    /// Values, in group order.
    pub values: Vec<f64>,
}

/// The vertical axis.
#[derive(Clone, Copy)]
pub struct Axis {
    /// Label of the axis.
    pub label: &'static str,
    /// Value above which bars are clipped.
    pub top: f64,
    /// Set for a logarithmic scale that starts at 0.1.
    pub tens: bool,
}

impl Axis {
    /// Lower end of a logarithmic scale.
    const MIN_SHOWN: f64 = 0.1;

    /// Returns the height of a value on the axis.
    fn height(self, value: f64) -> f64 {
        if self.tens { value.max(Self::MIN_SHOWN).log10() } else { value }
    }

    fn name(self, height: f64) -> String {
        let value = if self.tens { 10f64.powf(height) } else { height };
        if value < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") }
    }
}

/// Draws groups of bars, with one bar per series in each group. The line at 1 is the baseline.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn draw(file: &Path, title: &str, groups: &[&str], kinds: &[Kind], axis: Axis) -> Result<()> {
    let drawn = || -> Result<(), Box<dyn std::error::Error>> {
        let width = GROUP * groups.len() as u32 + 120;
        let area = SVGBackend::new(file, (width, HEIGHT)).into_drawing_area();
        area.fill(&WHITE)?;
        let highest = kinds.iter().flat_map(|kind| &kind.values).copied().fold(1.0, f64::max) * 1.1;
        let [floor, top] =
            [if axis.tens { Axis::MIN_SHOWN } else { 0.0 }, highest.min(axis.top)].map(|value| axis.height(value));
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(70)
            .y_label_area_size(52)
            .build_cartesian_2d(0.0..groups.len() as f64, floor..top)?;
        let name = |at: &f64| groups.get(*at as usize).copied().unwrap_or_default().to_owned();
        let label = ("sans-serif", 12).into_font().transform(FontTransform::Rotate90);
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(groups.len() + 1)
            .x_label_formatter(&name)
            .x_label_style(label)
            .y_label_formatter(&|height| axis.name(*height))
            .y_desc(axis.label)
            .draw()?;
        let bar = FILLED / kinds.len() as f64;
        for (index, (kind, colour)) in kinds.iter().zip(COLOURS.into_iter().cycle()).enumerate() {
            let left = |group: usize| group as f64 + (1.0 - FILLED) / 2.0 + index as f64 * bar;
            let bars = kind.values.iter().enumerate().map(|(group, value)| {
                let height = axis.height(*value).min(top);
                Rectangle::new([(left(group), floor), (left(group) + bar, height)], colour.filled())
            });
            chart
                .draw_series(bars)?
                .label(&kind.name)
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        }
        chart.draw_series([PathElement::new(
            [(0.0, axis.height(1.0)), (groups.len() as f64, axis.height(1.0))],
            BLACK,
        )])?;
        chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
        area.present()?;
        Ok(())
    };
    drawn().map_err(|error| anyhow!("{error}")).with_context(|| format!("picture {}", file.display()))
}
