//! Measures Hearth beside its peers, in turn, on the same files, within one run.
//!
//! Absolute speed belongs to the machine; ratios belong to the program. So every row runs its
//! contenders round by round (A B C, A B C, …) and compares within a round. fio is the client,
//! and where fio cannot connect (vhost-user), one loop over libblkio for all contenders. Results go to a table, to Markdown and to JSON.

mod args;
mod fio;
mod fixture;
mod host;
mod made;
mod peers;
mod report;
mod rows;

use anyhow::Result;

fn main() -> Result<()> {
    let Some(args) = args::Args::parse(std::env::args().skip(1))? else {
        return Ok(());
    };
    let host = host::describe(&args);
    for (what, value) in &host {
        eprintln!("{what:>12}: {value}");
    }
    let mut results = report::Results::new(host);
    for row in rows::ALL {
        if !args.wants(row.id) {
            continue;
        }
        eprintln!("\n== {}: {}", row.id, row.title);
        match (row.run)(&args) {
            Ok(outcome) => {
                let text = report::table(row, &outcome);
                eprintln!("{text}");
                results.add(row, outcome);
            }
            Err(e) => {
                eprintln!("   failed: {e:#}");
                results.failed(row, &format!("{e:#}"));
            }
        }
        // After every row: a run that is interrupted keeps what it has measured.
        results.save(&args.out)?;
    }
    println!("{}", results.summary());
    anyhow::ensure!(
        !args.smoke || results.failures() == 0,
        "some rows could not be measured"
    );
    Ok(())
}
