//! A report as one page that needs nothing else: no script, no font, no picture from elsewhere.
//!
//! Bars are on a logarithmic axis: a hard disk and an SSD differ a hundredfold, and on a linear
//! one the hard disk is a line. The whisker of a bar goes from the smallest to the largest round.

use super::markdown::{COSTS, spread};
use super::report::{Cell, Report, Table};
use super::summary::{self, Line};
use crate::report::number;
use hearth_simulate::plot::escaped;
use std::fmt::Write;

const WIDTH: f64 = 760.0;
/// Room for a row's name, and for the number behind a bar.
const LEFT: f64 = 170.0;
const RIGHT: f64 = 150.0;
const BAR: f64 = 22.0;
const TOP: f64 = 24.0;

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1b1b1b; --soft: #6b6b6b; --line: #d8d8d8; --back: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --soft: #a2a2a2; --line: #444; --back: #161616; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .8rem 0; display: block; overflow-x: auto; }
td, th { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }
td:first-child, th:first-child { text-align: left; }
table.facts td { text-align: left; vertical-align: top; }
.met { color: #1a7f37; } .missed { color: #cf222e; font-weight: 600; }
@media (prefers-color-scheme: dark) { .met { color: #3fb950; } .missed { color: #ff7b72; } }
svg { max-width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .soft { fill: var(--soft); } svg .axis { stroke: var(--line); } svg .whisker { stroke: var(--ink); }
";

/// Colours that stay apart for most colour-blind readers (Okabe and Ito).
fn colour(row: &str) -> &'static str {
    match row {
        r if r.starts_with("warm") => "#D55E00",
        r if r.starts_with("cold") => "#0072B2",
        r if r.starts_with("flash") => "#009E73",
        r if r.starts_with("cache off") => "#56B4E9",
        _ => "#8a8a8a",
    }
}

/// A report.
pub fn report(report: &Report) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Results of hearth bench</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         <h1>Results of hearth bench</h1>\n<table class=\"facts\">\n"
    );
    for fact in &report.host {
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td>{}</td></tr>",
            escaped(&fact.name),
            escaped(&fact.value)
        );
    }
    page.push_str("</table>\n");
    if let Some((met, missed)) = report.score() {
        let _ = writeln!(page, "<p>Goals: {met} met, {missed} missed.</p>");
    }
    if let Some(why) = report.cut_short() {
        let _ = writeln!(page, "<p class=\"missed\">{why}</p>");
    }
    for caution in &report.cautions {
        let _ = writeln!(page, "<p>{}</p>", escaped(caution));
    }
    for failure in &report.failures {
        let _ = writeln!(
            page,
            "<p class=\"missed\">Not measured: {}</p>",
            escaped(failure)
        );
    }
    summarised(&mut page, &report.summary);
    for table in &report.tables {
        section(&mut page, table);
    }
    page += "</body>\n</html>\n";
    page
}

fn summarised(page: &mut String, lines: &[Line]) {
    if lines.is_empty() {
        return;
    }
    page.push_str("<h2>What the cache changed</h2>\n");
    for sentence in summary::sentences(lines) {
        let _ = writeln!(page, "<p>{}</p>", escaped(&sentence));
    }
    for (over, lines) in summary::groups(lines) {
        let headings = summary::HEADINGS.join("</th><th>");
        let _ = writeln!(
            page,
            "<p>Over {}:</p>\n<table>\n<tr><th>{headings}</th></tr>",
            escaped(over)
        );
        for line in lines {
            let cells = summary::cells(line).map(|c| escaped(&c)).join("</td><td>");
            let _ = writeln!(page, "<tr><td>{cells}</td></tr>");
        }
        page.push_str("</table>\n");
    }
}

fn section(page: &mut String, table: &Table) {
    let better = if table.more_is_better { "more" } else { "less" };
    let _ = writeln!(
        page,
        "<h2 id=\"{0}\">{1}</h2>\n<p>{2}: median (smallest–largest) of the rounds; {better} is better.</p>",
        escaped(&table.id),
        escaped(&table.title),
        escaped(&table.unit)
    );
    grid(page, table, |c| Some(spread(c)));
    for column in &table.columns {
        chart(page, table, column);
    }
    if !table.goals.is_empty() {
        page.push_str("<table>\n<tr><th>comparison, round by round</th><th>min</th><th>median</th><th>max</th><th>goal</th><th></th></tr>\n");
    }
    for goal in &table.goals {
        let class = goal.verdict().to_lowercase();
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td class=\"{class}\">{class}</td></tr>",
            escaped(&goal.what),
            goal.spread_words().join("</td><td>"),
            goal.goal()
        );
    }
    if !table.goals.is_empty() {
        page.push_str("</table>\n");
    }
    for note in &table.notes {
        let _ = writeln!(page, "<p>{}</p>", escaped(note));
    }
    for (heading, figure) in COSTS {
        if table.cells.iter().any(|c| c.median(figure).is_some()) {
            let _ = writeln!(page, "<details><summary>{heading}</summary>");
            grid(page, table, |c| c.median(figure).map(number));
            page.push_str("</details>\n");
        }
    }
}

fn grid(page: &mut String, table: &Table, show: impl Fn(&Cell) -> Option<String>) {
    page.push_str("<table>\n<tr><th></th>");
    for column in &table.columns {
        let _ = write!(page, "<th>{}</th>", escaped(column));
    }
    page.push_str("</tr>\n");
    for row in &table.rows {
        let _ = write!(page, "<tr><td>{}</td>", escaped(row));
        for column in &table.columns {
            let cell = table.cell(row, column).and_then(&show);
            let _ = write!(page, "<td>{}</td>", cell.unwrap_or_else(|| "–".to_owned()));
        }
        page.push_str("</tr>\n");
    }
    page.push_str("</table>\n");
}

/// The bars of one column.
fn chart(page: &mut String, table: &Table, column: &str) {
    let cells: Vec<&Cell> = table
        .rows
        .iter()
        .filter_map(|row| table.cell(row, column))
        .filter(|c| c.spread.min > 0.0)
        .collect();
    let least = cells.iter().map(|c| c.spread.min).fold(f64::MAX, f64::min);
    let most = cells.iter().map(|c| c.spread.max).fold(0.0, f64::max);
    if cells.is_empty() {
        return;
    }
    // Whole decades around all values.
    let (from, to) = (least.log10().floor(), most.log10().ceil());
    let to = to.max(from + 1.0);
    let x = |v: f64| LEFT + (v.log10() - from) / (to - from) * (WIDTH - LEFT - RIGHT);
    let bottom = TOP + BAR * cells.len() as f64;
    let _ = writeln!(
        page,
        "<svg viewBox=\"0 0 {WIDTH} {:.0}\" width=\"{WIDTH}\" role=\"img\" aria-label=\"{1}\">\n\
         <text x=\"0\" y=\"15\" font-weight=\"600\">{1}, {2}</text>",
        bottom + 20.0,
        escaped(column),
        escaped(&table.unit)
    );
    for decade in from as i32..=to as i32 {
        let at = x(10f64.powi(decade));
        let _ = writeln!(
            page,
            "<line class=\"axis\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>\
             <text class=\"soft\" x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            bottom + 14.0,
            number(10f64.powi(decade))
        );
    }
    for (i, cell) in cells.iter().enumerate() {
        let y = TOP + BAR * i as f64;
        let middle = y + BAR / 2.0;
        let s = cell.spread;
        let (words, name) = (spread(cell), escaped(&cell.row));
        let _ = writeln!(
            page,
            "<g><title>{name}: {words}</title>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>\
             <rect x=\"{LEFT}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"/>\
             <line class=\"whisker\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{middle:.1}\" y2=\"{middle:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{words}</text></g>",
            LEFT - 8.0,
            middle + 4.0,
            y + 3.0,
            (x(s.median) - LEFT).max(1.0),
            BAR - 6.0,
            colour(&cell.row),
            x(s.min),
            x(s.max),
            x(s.max).max(x(s.median)) + 6.0,
            middle + 4.0
        );
    }
    page.push_str("</svg>\n");
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::made;

    #[test]
    fn a_page_stands_alone() {
        let page = super::report(&made(&[(100.0, 9000.0), (110.0, 9900.0)]));
        for elsewhere in ["<script", "src=", "href=", "url(", "@import", "http"] {
            assert!(!page.contains(elsewhere), "{elsewhere}");
        }
        assert!(page.contains("A &lt;table&gt;"));
        assert!(page.contains("<td class=\"met\">met</td>"));
        for tag in ["table", "svg", "tr", "td", "g", "details"] {
            let opened = page.matches(&format!("<{tag} ")).count()
                + page.matches(&format!("<{tag}>")).count();
            assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
        }
        assert!(!page.contains("NaN") && !page.contains("inf"));
    }

    #[test]
    fn odd_values_draw_nothing_odd() {
        let page = super::report(&made(&[(0.0, 5.0)]));
        assert!(!page.contains("NaN") && !page.contains("<rect x=\"170\" y=\"27.0\" width=\"-"));
    }
}
