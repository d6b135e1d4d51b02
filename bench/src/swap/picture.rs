//! Draws self-contained line charts.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::prelude::{ChartBuilder, Color, IntoDrawingArea, LineSeries, PathElement, RGBColor, SVGBackend, WHITE};
use plotters::style::BLACK;

/// Colours that most people can distinguish (Okabe and Ito), used cyclically.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
];
/// Width and height of an image in pixels.
const PICTURE_SIZE_PX: (u32, u32) = (900, 480);

/// Texts of a chart.
pub struct Picture<'a> {
    /// Title above the chart.
    pub title: &'a str,
    /// Unit of the horizontal axis.
    pub x: &'a str,
    /// Unit of the vertical axis.
    pub y: &'a str,
}

/// A line of a chart.
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Points in drawing order.
    pub points: Vec<(f64, f64)>,
}

/// Draws `series` into `file`.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn draw(file: &Path, picture: &Picture<'_>, series: &[Series]) -> Result<()> {
    let Picture { title, x, y } = *picture;
    let points = || series.iter().flat_map(|series| &series.points);
    let end = points().map(|(at, _)| *at).fold(0.0, f64::max);
    let most = points().map(|(_, value)| *value).fold(0.0, f64::max) * 1.1;
    let drawn = || -> Result<(), Box<dyn std::error::Error>> {
        let area = SVGBackend::new(file, PICTURE_SIZE_PX).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 18))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(52)
            .build_cartesian_2d(0.0..end, 0.0..most)?;
        chart.configure_mesh().x_desc(x).y_desc(y).draw()?;
        for (line, colour) in series.iter().zip(COLOURS.into_iter().cycle()) {
            chart
                .draw_series(LineSeries::new(line.points.iter().copied(), colour.stroke_width(2)))?
                .label(&line.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        }
        chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
        area.present()?;
        Ok(())
    };
    drawn().map_err(|error| anyhow!("{error}")).with_context(|| format!("picture {}", file.display()))
}
