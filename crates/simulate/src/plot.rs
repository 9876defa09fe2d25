//! Hit ratio over cache size as a picture: plain SVG that any browser shows.

use std::fmt::Write as _;

use crate::run::Row;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 36.0;
const BOTTOM: f64 = 44.0;
/// Colours that stay apart for most colour-blind readers (Okabe and Ito), then greys.
const COLOURS: [&str; 10] = [
    "#D55E00", "#E69F00", "#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#8C6D31", "#999933",
    "#777777", "#000000",
];

/// Text that is safe inside an element or an attribute of SVG and HTML.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// One chart for each trace in `rows`, one below the other. Sizes are on a logarithmic axis.
pub fn svg(rows: &[Row]) -> String {
    let mut traces: Vec<&str> = Vec::new();
    for row in rows {
        if !traces.contains(&row.trace.as_str()) {
            traces.push(&row.trace);
        }
    }
    let mut out = String::new();
    let height = HEIGHT * traces.len().max(1) as f64;
    // Writing to a string cannot fail.
    let _ = write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (i, trace) in traces.iter().enumerate() {
        let _ = writeln!(out, "<g transform=\"translate(0 {})\">", HEIGHT * i as f64);
        let of: Vec<&Row> = rows.iter().filter(|r| r.trace == *trace).collect();
        chart(&mut out, trace, &of);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

fn chart(out: &mut String, trace: &str, rows: &[&Row]) {
    let (least, most) = rows.iter().fold((f64::MAX, 0.0f64), |(a, b), r| {
        (a.min(r.blocks as f64), b.max(r.blocks as f64))
    });
    let span = (most.ln() - least.ln()).max(1e-9);
    let right = WIDTH - RIGHT;
    let bottom = HEIGHT - BOTTOM;
    let x = |blocks: f64| LEFT + (blocks.ln() - least.ln()) / span * (right - LEFT);
    let y = |score: f64| bottom - score * (bottom - TOP);
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"20\" font-size=\"14\">{}: hit ratio over cache size</text>",
        escaped(trace)
    );
    for step in 0..=5 {
        let score = f64::from(step) / 5.0;
        let at = y(score);
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{:.0} %</text>",
            LEFT - 6.0,
            at + 4.0,
            score * 100.0
        );
    }
    let mut sizes: Vec<(usize, f64)> = rows.iter().map(|r| (r.blocks, r.fraction)).collect();
    sizes.sort_by_key(|s| s.0);
    sizes.dedup_by_key(|s| s.0);
    for (blocks, fraction) in sizes {
        let label = if fraction > 0.0 {
            format!("{} %", (fraction * 1000.0).round() / 10.0)
        } else {
            format!("{blocks}")
        };
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
            x(blocks as f64),
            bottom + 18.0
        );
    }
    let mut policies: Vec<&str> = Vec::new();
    for r in rows {
        if !policies.contains(&r.policy) {
            policies.push(r.policy);
        }
    }
    for (i, policy) in policies.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let mut points: Vec<(f64, f64)> = rows
            .iter()
            .filter(|r| r.policy == *policy)
            .map(|r| (x(r.blocks as f64), y(r.score)))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let line: Vec<String> = points
            .iter()
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        let wide = if policy.starts_with("hearth") { 3 } else { 1 };
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{wide}\"/>",
            line.join(" ")
        );
        for (x, y) in points {
            let _ = writeln!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"{colour}\"/>"
            );
        }
        let at = TOP + 8.0 + 18.0 * i as f64;
        let _ = writeln!(
            out,
            "<line x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{at}\" y2=\"{at}\" stroke=\"{colour}\" stroke-width=\"{wide}\"/>\
             <text x=\"{:.1}\" y=\"{}\">{}</text>",
            right + 14.0,
            right + 36.0,
            right + 42.0,
            at + 4.0,
            escaped(policy)
        );
    }
}
