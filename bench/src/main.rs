//! The program `hearth-bench`: rows beside peers. fio is the client, and where fio cannot connect
//! (vhost-user), one loop over libblkio for all contenders. Results go to a table, to Markdown
//! and to JSON.

use anyhow::{Context, Result};
use hearth_bench::{aab, args, bare, bare_nfs, host, overcommit, report, rows};

fn main() -> Result<()> {
    let words: Vec<_> = std::env::args_os().collect();
    if let [_, word, file, socket] = words.as_slice()
        && word == bare::WORD
    {
        return bare::serve(file.as_ref(), socket.as_ref());
    }
    if let [_, word, file] = words.as_slice()
        && word == bare_nfs::WORD
    {
        return bare_nfs::serve(file.as_ref());
    }
    let Some(args) = args::Args::parse(std::env::args().skip(1))? else {
        return Ok(());
    };
    if args.overcommit {
        return overcommit::run(&args);
    }
    let host = host::describe(&args);
    for (what, value) in &host {
        eprintln!("{what:>12}: {value}");
    }
    if args.aab {
        let old = args.old.as_deref();
        return aab::compare(
            &args,
            old.context("--aab needs --old, the old build's binary")?,
        );
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
