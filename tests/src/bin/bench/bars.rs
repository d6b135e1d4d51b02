//! Groups of bars, as a picture that needs nothing beside it.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::prelude::{
    ChartBuilder, Color, IntoDrawingArea, IntoFont, PathElement, RGBColor, Rectangle, SVGBackend, WHITE,
};
use plotters::style::{BLACK, FontTransform};

/// Colours that can be told apart by most people (Okabe and Ito).
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 0, 0),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
];
/// Height, and width of a group, in pixels.
const HEIGHT: u32 = 480;
const GROUP: u32 = 62;
/// Part of a group's width that its bars take.
const FILLED: f64 = 0.84;

/// Bars of one kind: a value for each group.
pub struct Kind {
    /// As the legend says it.
    pub name: String,
    /// In the order of the groups.
    pub values: Vec<f64>,
}

/// Draws groups of bars, one of each kind; the line at 1 is what all are compared with. Bars that are higher than `top` are cut off there.
///
/// # Errors
/// When the file cannot be written.
pub fn draw(file: &Path, title: &str, groups: &[&str], kinds: &[Kind], top: f64) -> Result<()> {
    let drawn = || -> Result<(), Box<dyn std::error::Error>> {
        let width = GROUP * groups.len() as u32 + 120;
        let area = SVGBackend::new(file, (width, HEIGHT)).into_drawing_area();
        area.fill(&WHITE)?;
        let highest = kinds.iter().flat_map(|kind| &kind.values).copied().fold(1.0, f64::max) * 1.1;
        let top = highest.min(top);
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(70)
            .y_label_area_size(52)
            .build_cartesian_2d(0.0..groups.len() as f64, 0.0..top)?;
        let name = |at: &f64| groups.get(*at as usize).copied().unwrap_or_default().to_owned();
        let label = ("sans-serif", 12).into_font().transform(FontTransform::Rotate90);
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(groups.len() + 1)
            .x_label_formatter(&name)
            .x_label_style(label)
            .y_desc("time / passthrough")
            .draw()?;
        let bar = FILLED / kinds.len() as f64;
        for (index, (kind, colour)) in kinds.iter().zip(COLOURS.into_iter().cycle()).enumerate() {
            let left = |group: usize| group as f64 + (1.0 - FILLED) / 2.0 + index as f64 * bar;
            let bars = kind.values.iter().enumerate().map(|(group, value)| {
                Rectangle::new([(left(group), 0.0), (left(group) + bar, value.min(top))], colour.filled())
            });
            chart
                .draw_series(bars)?
                .label(&kind.name)
                .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
        }
        chart.draw_series([PathElement::new([(0.0, 1.0), (groups.len() as f64, 1.0)], BLACK)])?;
        chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
        area.present()?;
        Ok(())
    };
    drawn().map_err(|error| anyhow!("{error}")).with_context(|| format!("picture {}", file.display()))
}
