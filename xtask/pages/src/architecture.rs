//! Draws the architecture diagram: boxes with their crates, and arrows.

use std::fmt::Write;

/// Width and height of the picture, in pixels.
const SIZE: (i32, i32) = (900, 580);

/// A box: its upper left corner, width and height, fill color, title, and either crates or a note.
struct Part {
    at: (i32, i32),
    size: (i32, i32),
    fill: &'static str,
    title: &'static str,
    crates: &'static [&'static str],
    note: &'static str,
}

/// An arrow from one point to another, with text to the right of its middle.
struct Arrow {
    from: (i32, i32),
    to: (i32, i32),
    text: &'static str,
}

/// Fill color of tenants and operators.
const OUTSIDE: &str = "#fdf3dc";
/// Fill color of the mediator's parts.
const OURS: &str = "#ddeaf6";
/// Fill color of cards.
const CARD: &str = "#e2f1e3";

const PARTS: [Part; 13] = [
    Part {
        at: (20, 20),
        size: (270, 56),
        fill: OUTSIDE,
        title: "CUDA programs",
        crates: &[],
        note: "processes, containers, pods, jobs",
    },
    Part {
        at: (330, 20),
        size: (230, 56),
        fill: OUTSIDE,
        title: "Virtual machines",
        crates: &[],
        note: "QEMU, cloud-hypervisor; nouveau",
    },
    Part { at: (575, 20), size: (120, 56), fill: OUTSIDE, title: "Xen domains", crates: &[], note: "nouveau" },
    Part {
        at: (710, 20),
        size: (170, 56),
        fill: OUTSIDE,
        title: "Operators",
        crates: &["mediatorctl", "fleet-dra"],
        note: "",
    },
    Part {
        at: (20, 150),
        size: (270, 56),
        fill: OURS,
        title: "Driver library in the program",
        crates: &["cuda-shim"],
        note: "",
    },
    Part { at: (310, 110), size: (570, 310), fill: "#f4f7fb", title: "One daemon", crates: &["mediatord"], note: "" },
    Part {
        at: (330, 180),
        size: (380, 56),
        fill: OURS,
        title: "Server for VMMs and Xen",
        crates: &["vmm-glue"],
        note: "",
    },
    Part { at: (730, 180), size: (130, 56), fill: OURS, title: "Admin API", crates: &["api", "config"], note: "" },
    Part {
        at: (330, 264),
        size: (380, 56),
        fill: OURS,
        title: "A virtual GPU for each VM",
        crates: &["vgpu", "devmodel", "shadow-pt", "channels"],
        note: "",
    },
    Part {
        at: (330, 348),
        size: (380, 56),
        fill: OURS,
        title: "Owner of a VM card",
        crates: &["card-manager", "card-memory", "sched", "vram"],
        note: "",
    },
    Part {
        at: (20, 348),
        size: (270, 56),
        fill: OURS,
        title: "Owner of a CUDA card, a process",
        crates: &["cuda-owner", "sched", "vram"],
        note: "",
    },
    Part {
        at: (20, 490),
        size: (270, 56),
        fill: CARD,
        title: "GPU with NVIDIA's driver",
        crates: &[],
        note: "H100, H200",
    },
    Part {
        at: (330, 490),
        size: (380, 56),
        fill: CARD,
        title: "GF100, in software or behind VFIO",
        crates: &["simgpu", "vfio-card"],
        note: "",
    },
];

const ARROWS: [Arrow; 9] = [
    Arrow { from: (140, 76), to: (140, 150), text: "CUDA driver API" },
    Arrow { from: (140, 206), to: (140, 348), text: "memory, turns" },
    Arrow { from: (140, 404), to: (140, 490), text: "driver" },
    Arrow { from: (445, 76), to: (445, 180), text: "" },
    Arrow { from: (670, 76), to: (670, 180), text: "" },
    Arrow { from: (805, 76), to: (805, 180), text: "" },
    Arrow { from: (520, 236), to: (520, 264), text: "registers, memory" },
    Arrow { from: (520, 320), to: (520, 348), text: "submissions" },
    Arrow { from: (520, 404), to: (520, 490), text: "" },
];

/// Arrow from the daemon to the CUDA owner that it controls.
const CONTROL: Arrow = Arrow { from: (310, 376), to: (290, 376), text: "" };
const NOTES: [((i32, i32), &str); 4] =
    [((452, 98), "vfio-user"), ((677, 98), "ioctl"), ((812, 98), "HTTP"), ((527, 458), "PCI function (crate card)")];

/// Returns the picture as SVG.
#[must_use]
pub fn svg() -> String {
    let (width, height) = SIZE;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\" fill=\"#1b1f24\">\n\
         <title>Architecture of gpu-mediator</title>\n\
         <defs><marker id=\"tip\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"8\" markerHeight=\"8\" \
         orient=\"auto\"><path d=\"M0 0L8 4L0 8z\" fill=\"#444c56\"/></marker></defs>\n\
         <rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"#ffffff\"/>\n"
    );
    for Part { at: (x, y), size: (width, height), fill, title, crates, note } in PARTS {
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"5\" fill=\"{fill}\" stroke=\"#444c56\"/>"
        );
        let middle = x + width / 2;
        let _ = writeln!(
            svg,
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\" font-weight=\"bold\">{}</text>",
            y + 23,
            escaped(title)
        );
        let (second, family) =
            if crates.is_empty() { (note.to_owned(), "sans-serif") } else { (crates.join(", "), "monospace") };
        let _ = writeln!(
            svg,
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\" font-family=\"{family}\" font-size=\"12\">{}</text>",
            y + 43,
            escaped(&second)
        );
    }
    for Arrow { from, to, text } in ARROWS.iter().chain([&CONTROL]) {
        let _ = writeln!(
            svg,
            "<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" stroke=\"#444c56\" stroke-width=\"1.5\" marker-end=\"url(#tip)\"/>",
            from.0, from.1, to.0, to.1
        );
        note(&mut svg, ((from.0 + to.0) / 2 + 7, (from.1 + to.1) / 2 + 4), text);
    }
    NOTES.iter().for_each(|(at, text)| note(&mut svg, *at, text));
    svg + "</svg>\n"
}

/// Appends text in the small font.
fn note(svg: &mut String, (x, y): (i32, i32), text: &str) {
    if !text.is_empty() {
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" font-size=\"11\">{}</text>", escaped(text));
    }
}

/// Escapes text for XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Returns the names of the workspace's packages.
    fn packages() -> BTreeSet<String> {
        let read = |path: &str| -> toml::Table {
            std::fs::read_to_string(crate::root(path)).unwrap().parse::<toml::Table>().unwrap()
        };
        let root = read("Cargo.toml");
        let members = root["workspace"]["members"].as_array().unwrap().iter().map(|member| member.as_str().unwrap());
        members
            .map(|member| read(&format!("{member}/Cargo.toml"))["package"]["name"].as_str().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn generated_architecture_names_crates_and_is_committed() {
        let packages = packages();
        for name in PARTS.iter().flat_map(|part| part.crates) {
            assert!(packages.contains(*name), "there is no crate {name}");
        }
        crate::file("docs/images/architecture.svg", &svg());
    }

    #[test]
    fn boxes_hold_their_text_and_do_not_cross() {
        let edges = |part: &Part| (part.at.0, part.at.1, part.at.0 + part.size.0, part.at.1 + part.size.1);
        let inside = |a: &Part, b: &Part| {
            let (a, b) = (edges(a), edges(b));
            a.0 > b.0 && a.1 > b.1 && a.2 < b.2 && a.3 < b.3
        };
        for (number, part) in PARTS.iter().enumerate() {
            let (left, top, right, bottom) = edges(part);
            // Compute with the average character widths of the three fonts, in half pixels.
            let widest = [part.title.len() * 16, part.crates.join(", ").len() * 15, part.note.len() * 14];
            let width = usize::try_from(part.size.0).unwrap();
            assert!(widest.iter().all(|halves| halves / 2 < width), "{}: its text is too long", part.title);
            assert!(left >= 0 && top >= 0 && right <= SIZE.0 && bottom <= SIZE.1, "{}", part.title);
            for other in &PARTS[..number] {
                let (b, a) = (edges(other), edges(part));
                let apart = a.2 <= b.0 || b.2 <= a.0 || a.3 <= b.1 || b.3 <= a.1;
                assert!(apart || inside(part, other) || inside(other, part), "{} crosses {}", part.title, other.title);
            }
        }
    }
}
