//! `hearth advise`: a disk's curve, what sizes do, and shares of the pool.

use std::fmt::Write as _;

use hearth_daemon::api::advice::{Advice, AdviceReport, CurvePoint, Suggestion};
use hearth_daemon::api::types::{DiskInfo, DiskSet};
use hearth_daemon::client::{Client, datastore_path, disk_path};
use hearth_daemon::error::{Error, Kind};
use hearth_daemon::progress::human_seconds;
use hearth_daemon::size::human;
use hearth_simulate::plot::escaped;

use crate::args::{Advise, Global, Switch};
use crate::stats::{micros, percent};
use crate::table::{Table, plain};
use crate::{Outcome, print_json};

/// Columns and rows of a curve in the terminal.
const COLUMNS: usize = 64;
const ROWS: usize = 10;

pub fn run(global: &Global, args: &Advise) -> Outcome {
    let client = Client::new(&global.dir());
    let file = args.name.as_ref().and_then(|name| name.split_once('/'));
    if let Some((store, path)) = file {
        return of_files(global, &client, args, store, path);
    }
    let path = |rest: &str| match &args.name {
        Some(name) => disk_path(name, &format!("/advice{rest}")),
        None => format!("/v1/advice{rest}"),
    };
    if let Some(switch) = args.auto {
        let names = match &args.name {
            Some(name) => vec![name.clone()],
            None => client
                .get::<Vec<DiskInfo>>("/v1/disks")?
                .into_iter()
                .map(|d| d.name)
                .collect(),
        };
        for name in names {
            let mut set = DiskSet::default();
            set.settings.auto = Some(switch == Switch::On);
            let info: DiskInfo = client.patch(&disk_path(&name, ""), &set)?;
            if !global.json {
                println!(
                    "disk {}: the flash kept for it {}",
                    plain(&info.name),
                    if info.settings.auto {
                        "follows the advice"
                    } else {
                        "is what --min says"
                    }
                );
            }
        }
    }
    let report: AdviceReport = if args.apply {
        client.order(&path("/apply"))?
    } else {
        client.get(&path(""))?
    };
    draw(args, &report)?;
    if global.json {
        return print_json(&report);
    }
    print!("{}", text(&report, args.name.is_some()));
    for applied in &report.applied {
        println!(
            "disk {}: {} of flash kept for it until the daemon stops",
            plain(&applied.name),
            human(applied.kept)
        );
    }
    Ok(())
}

/// Draws the curves, if that is wanted.
fn draw(args: &Advise, report: &AdviceReport) -> Result<(), Error> {
    let Some(file) = &args.svg else {
        return Ok(());
    };
    std::fs::write(file, svg(report)).map_err(|e| {
        Error::invalid(
            format!("the picture {} cannot be written: {e}", file.display()),
            "give a path where you may write",
        )
    })
}

/// Advice for one file of a datastore, or with no path for all that are watched.
fn of_files(global: &Global, client: &Client, args: &Advise, store: &str, path: &str) -> Outcome {
    if args.apply || args.auto.is_some() {
        return Err(Error::invalid(
            "what is kept for the files of a datastore is not set by advice",
            "see `hearth datastore set --match` with --max and --pin",
        )
        .into());
    }
    let mut report: AdviceReport = client.get(&datastore_path(store, "/advice"))?;
    if !path.is_empty() {
        let wanted = format!("{store}/{path}");
        report.files.retain(|a| a.name == wanted);
        if report.files.is_empty() {
            return Err(Error::new(
                Kind::NotFound,
                format!("nothing is known of {wanted}: no such file was used lately"),
                format!("`hearth advise {store}/` lists those that were"),
            )
            .into());
        }
    }
    draw(args, &report)?;
    if global.json {
        return print_json(&report);
    }
    print!("{}", text(&report, !path.is_empty()));
    Ok(())
}

fn text(report: &AdviceReport, one: bool) -> String {
    let mut out = String::new();
    let all: Vec<&Advice> = report.disks.iter().chain(&report.files).collect();
    if all.is_empty() {
        out.push_str("no disks, and no files of datastores that were used lately\n");
        return out;
    }
    if one || all.len() == 1 {
        for advice in all {
            out.push_str(&disk(advice));
        }
        return out;
    }
    let told: Vec<&Advice> = all.iter().copied().filter(|a| a.reason.is_none()).collect();
    if !told.is_empty() {
        out.push_str(&table("DISK", &told));
        let _ = writeln!(
            out,
            "\nSHARE divides the pool's {} so that the last GiB saves every disk the same time; nobody gains from {}.",
            human(report.capacity),
            human(report.left_over)
        );
    }
    for a in all {
        if let Some(reason) = &a.reason {
            let _ = writeln!(out, "{}: {}", kind(a), plain(reason));
        }
    }
    out
}

/// What it is, and what it is called.
fn kind(a: &Advice) -> String {
    // No disk's name has one in it.
    let what = if a.name.contains('/') { "file" } else { "disk" };
    format!("{what} {}", plain(&a.name))
}

/// What is known of several, a line each.
pub fn table(what: &str, all: &[&Advice]) -> String {
    let mut table = Table::new(&[
        what,
        ">WORKING SET",
        ">CACHED",
        ">HIT",
        ">MEAN READ",
        ">ADVISED",
        ">HIT",
        ">MEAN READ",
        ">SHARE",
        ">HIT",
    ]);
    for a in all {
        table.row([
            plain(&a.name),
            human(a.working_set),
            human(a.present.bytes),
            percent(Some(a.present.hit_ratio)),
            micros(Some(a.present.latency_us)),
            human(a.advised.bytes),
            percent(Some(a.advised.hit_ratio)),
            micros(Some(a.advised.latency_us)),
            human(a.share.bytes),
            percent(Some(a.share.hit_ratio)),
        ]);
    }
    table.render()
}

fn disk(a: &Advice) -> String {
    let mut out = String::new();
    if let Some(reason) = &a.reason {
        let _ = writeln!(out, "{}: {}", kind(a), plain(reason));
        return out;
    }
    let _ = writeln!(
        out,
        "{}: {} different data in {}, {} read a second\n",
        kind(a),
        human(a.working_set),
        human_seconds(a.seconds),
        human(a.bytes_per_second as u64)
    );
    out.push_str(&chart(a));
    out.push('\n');
    let mut table = Table::new(&[
        "",
        ">FLASH",
        ">HIT RATIO",
        ">AS LRU",
        ">MEAN READ",
        ">FLASH WRITES",
    ]);
    let mut row = |name: &str, e: &hearth_daemon::api::advice::Expected| {
        table.row([
            name.to_owned(),
            human(e.bytes),
            percent(Some(e.hit_ratio)),
            percent(Some(e.lru_hit_ratio)),
            micros(Some(e.latency_us)),
            e.flash_writes.map_or("-".to_owned(), |n| format!("{n:.2}")),
        ]);
    };
    row("now", &a.present);
    if let Some(knee) = &a.knee {
        row("where the curve bends", knee);
    }
    row("until the next GiB brings < 1 %", &a.advised);
    row("its share of the pool", &a.share);
    out.push_str(&table.render());
    let _ = writeln!(out, "\n{}", basis(a));
    let _ = writeln!(
        out,
        "A hit takes {}, a miss {}{}.",
        micros(Some(a.hit_us)),
        micros(Some(a.miss_us)),
        if a.latency_guessed {
            " (not both measured on this disk yet)"
        } else {
            ""
        }
    );
    if let Some(measured) = a.measured_hit_ratio {
        let _ = writeln!(
            out,
            "Measured over the last hour: {} of what was read came from flash.",
            percent(Some(measured))
        );
    }
    if let Some(s) = &a.block_size {
        let _ = writeln!(out, "{}", suggestion("Cache block size", s, |b| human(*b)));
    }
    if let Some(s) = &a.mode {
        let text = suggestion("Cache mode", s, |m| m.word().to_owned());
        let _ = writeln!(out, "{text}");
    }
    out
}

/// Where the figures come from.
fn basis(a: &Advice) -> String {
    let mut out = if a.own_rules {
        "The curve is what Hearth's own rules do in miniature (without reading ahead); AS LRU is what plain LRU would do."
    } else {
        "The curve is LRU's: too little was seen to tell what Hearth's own rules do."
    }
    .to_owned();
    if a.present.flash_writes.or(a.advised.flash_writes).is_some() {
        out.push_str(
            "\nFLASH WRITES is what flash takes, in write-back, for each block that the guest writes: the block, and what \
             misses bring. What is moved comes on top.",
        );
    }
    if let Some(cost) = a.measured_flash_writes {
        let _ = write!(
            out,
            "\nMeasured since the daemon started: {cost:.2} bytes written to flash for each byte that the guest wrote."
        );
    }
    out
}

fn suggestion<T: PartialEq>(what: &str, s: &Suggestion<T>, show: impl Fn(&T) -> String) -> String {
    if s.now == s.advised {
        format!("{what} {} is right: {}.", show(&s.now), plain(&s.because))
    } else {
        format!(
            "{what} should be {} (is {}): {}.",
            show(&s.advised),
            show(&s.now),
            plain(&s.because)
        )
    }
}

/// Hit ratio at a size, between the curve's points.
fn at(curve: &[CurvePoint], bytes: f64) -> f64 {
    let points: Vec<(f64, f64)> = curve
        .iter()
        .map(|p| (p.bytes as f64, p.hit_ratio))
        .collect();
    hearth_policy::advise::at(&points, bytes)
}

/// The curve in characters: size to the right, hit ratio upwards.
fn chart(a: &Advice) -> String {
    const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = a.curve.last().map_or(0, |p| p.bytes).max(1) as f64;
    let heights: Vec<usize> = (1..=COLUMNS)
        .map(|c| {
            let ratio = at(&a.curve, most * c as f64 / COLUMNS as f64);
            (ratio * (ROWS * 8) as f64).round() as usize
        })
        .collect();
    let mut out = String::new();
    for row in (0..ROWS).rev() {
        let label = if row == ROWS - 1 {
            "100 %"
        } else if row + 1 == ROWS / 2 {
            " 50 %"
        } else {
            "     "
        };
        let line: String = heights
            .iter()
            .map(|h| EIGHTHS[h.saturating_sub(row * 8).min(8)])
            .collect();
        let _ = writeln!(out, "{label} │{}", line.trim_end());
    }
    let _ = writeln!(out, "      └{}", "─".repeat(COLUMNS));
    let column =
        |bytes: u64| ((bytes as f64 / most * COLUMNS as f64).ceil() as usize).clamp(1, COLUMNS) - 1;
    let mut marks = vec![' '; COLUMNS];
    marks[column(a.advised.bytes)] = 'A';
    marks[column(a.present.bytes)] = 'N';
    let marks: String = marks.into_iter().collect();
    let _ = writeln!(
        out,
        "       {}\n       0{:>width$}   (N now, A advised)",
        marks.trim_end(),
        human(most as u64),
        width = COLUMNS - 1
    );
    out
}

/// The curves as pictures, one below the other, with the present and the advised size.
fn svg(report: &AdviceReport) -> String {
    const WIDTH: f64 = 720.0;
    const HEIGHT: f64 = 320.0;
    const LEFT: f64 = 56.0;
    const TOP: f64 = 36.0;
    let (right, bottom) = (WIDTH - 30.0, HEIGHT - 44.0);
    let disks = report.disks.iter().chain(&report.files);
    let disks: Vec<&Advice> = disks.filter(|a| a.reason.is_none()).collect();
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>",
        HEIGHT * disks.len().max(1) as f64
    );
    for (i, a) in disks.iter().enumerate() {
        let most = a.curve.last().map_or(0, |p| p.bytes).max(1) as f64;
        let x = |bytes: f64| LEFT + (bytes / most).min(1.0) * (right - LEFT);
        let y = |ratio: f64| bottom - ratio * (bottom - TOP);
        let _ = writeln!(
            out,
            "<g transform=\"translate(0 {})\">\n\
             <text x=\"{LEFT}\" y=\"20\" font-size=\"14\">{}: hit ratio over flash</text>",
            HEIGHT * i as f64,
            escaped(&a.name)
        );
        for step in 0..=5 {
            let ratio = f64::from(step) / 5.0;
            let _ = writeln!(
                out,
                "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{:.0} %</text>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                LEFT - 6.0,
                y(ratio) + 4.0,
                ratio * 100.0,
                x(most * ratio),
                bottom + 18.0,
                human((most * ratio) as u64),
                at = y(ratio)
            );
        }
        let line: Vec<String> = std::iter::once((0.0, 0.0))
            .chain(a.curve.iter().map(|p| (p.bytes as f64, p.hit_ratio)))
            .map(|(bytes, ratio)| format!("{:.1},{:.1}", x(bytes), y(ratio)))
            .collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"#0072B2\" stroke-width=\"2\"/>",
            line.join(" ")
        );
        for (e, name, colour) in [
            (&a.present, "now", "#777777"),
            (&a.advised, "advised", "#D55E00"),
            (&a.share, "share", "#009E73"),
        ] {
            let (cx, cy) = (x(e.bytes as f64), y(e.hit_ratio));
            let _ = writeln!(
                out,
                "<circle cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"4\" fill=\"{colour}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{name}: {}, {}</text>",
                (cx + 8.0).min(right - 150.0),
                cy + 14.0,
                human(e.bytes),
                percent(Some(e.hit_ratio))
            );
        }
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_daemon::api::advice::Expected;

    fn advice() -> Advice {
        let expected = |bytes, hit_ratio| Expected {
            bytes,
            hit_ratio,
            latency_us: 100.0,
            ..Expected::default()
        };
        Advice {
            name: "a<b".to_owned(),
            curve: (1..=100)
                .map(|i| CurvePoint {
                    bytes: i << 20,
                    hit_ratio: (i as f64 / 100.0).sqrt(),
                })
                .collect(),
            present: expected(10 << 20, 0.3),
            advised: expected(100 << 20, 1.0),
            ..Advice::default()
        }
    }

    #[test]
    fn the_chart_rises_to_the_right() {
        let chart = chart(&advice());
        let lines: Vec<&str> = chart.lines().collect();
        assert_eq!(lines.len(), ROWS + 3);
        assert!(lines[0].ends_with('█') && lines[0].chars().count() == COLUMNS + 7);
        assert!(lines[ROWS - 1].contains("│█"));
        assert!(lines[ROWS + 1].trim_start().starts_with('N'));
        assert!(lines[ROWS + 1].ends_with('A'));
    }

    #[test]
    fn whose_curve_it_is_and_what_writes_cost_is_said() {
        let mut own = advice();
        let shown = disk(&own);
        assert!(shown.contains("The curve is LRU's"), "{shown}");
        assert!(!shown.contains("FLASH WRITES is"), "{shown}");
        own.own_rules = true;
        own.present.lru_hit_ratio = 0.123;
        own.present.flash_writes = Some(1.5);
        own.measured_flash_writes = Some(2.25);
        let shown = disk(&own);
        let now = shown.lines().find(|l| l.starts_with("now"));
        assert!(
            now.is_some_and(|l| l.contains("12.3 %") && l.ends_with("1.50")),
            "{shown}"
        );
        assert!(
            shown.contains("Hearth's own rules") && shown.contains("2.25 bytes"),
            "{shown}"
        );
    }

    #[test]
    fn the_picture_is_whole_and_names_are_harmless() {
        let report = AdviceReport {
            disks: vec![advice()],
            ..AdviceReport::default()
        };
        let svg = svg(&report);
        assert!(svg.contains("a&lt;b") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN"));
    }

    #[test]
    fn without_enough_reads_the_reason_is_told() {
        let report = AdviceReport {
            disks: vec![Advice {
                reason: Some("only 3 MiB read".to_owned()),
                ..advice()
            }],
            ..AdviceReport::default()
        };
        assert!(text(&report, false).contains("only 3 MiB read"));
    }
}
