//! The host's settings: a daemon that goes by them, and what is said of wrong ones.

use crate::common::{Bench, one_sentence, text, until};

/// Writes a file of settings; its name.
fn settings(bench: &Bench, text: &str) -> String {
    let file = bench.path("hearth.toml");
    std::fs::write(&file, text).unwrap();
    file
}

/// What a daemon logs that is started with these arguments, until it is told to end.
fn logged(bench: &Bench, args: &[&str]) -> String {
    let log = bench.path("log");
    let mut child = bench
        .command(args)
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    until("the daemon serves", || {
        if let Some(status) = child.try_wait().unwrap() {
            panic!("the daemon ended with {status}:\n{}", bench.log());
        }
        bench.run(&["pool", "show"]).status.success().then_some(())
    });
    // SAFETY: a signal to a child that has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    assert!(until("the daemon ends", || child.try_wait().unwrap()).success());
    bench.log()
}

#[test]
fn a_daemon_goes_by_the_file_and_by_what_is_typed_first() {
    let bench = Bench::with_pool();
    let flash = bench.path("flash");
    let text = format!("[serve]\nflash = \"{flash}\"\nlog-format = \"json\"\nthreads = 1\n");
    let file = settings(&bench, &text);
    assert!(bench.ok(&["config", "check", &file]).contains("3 settings"));
    assert_eq!(bench.json(&["config", "check", &file])["settings"], 3);

    let is_json = |log: &str| log.lines().all(|line| line.starts_with('{'));
    let log = logged(&bench, &["serve", "--config", &file]);
    assert!(!log.is_empty() && is_json(&log), "{log}");
    let log = logged(&bench, &["serve", "--config", &file, "--log-format=text"]);
    assert!(!is_json(&log), "{log}");
}

#[test]
fn what_is_wrong_keeps_a_daemon_from_starting() {
    let bench = Bench::with_pool();
    let file = settings(&bench, "# mine\n\n[serve]\nthreads = 9\n");
    let told = bench.refused(&["config", "check", &file]);
    assert!(
        told.contains("hearth.toml:4:11: `threads`: 9 is not in 1..=8"),
        "{told}"
    );
    // The status that supervisors do not try again after.
    let out = bench.run(&["serve", "--flash", &bench.path("flash"), "--config", &file]);
    assert!(one_sentence(&out, 2).contains("hearth.toml:4:11"));
    let out = bench.run(&["--json", "serve", "--config", &file]);
    assert_eq!(out.status.code(), Some(2));
    let body: serde_json::Value = serde_json::from_slice(&out.stderr).unwrap();
    assert!(body["error"].as_str().unwrap().contains("1..=8"), "{body}");

    let file = settings(&bench, "[serve]\n");
    let out = bench.run(&["serve", "--config", &file]);
    assert!(
        one_sentence(&out, 2).contains("--flash"),
        "{}",
        text(&out.stderr)
    );

    // What only all settings together show.
    for (settings_text, words) in [
        ("[serve]\nallow-remote = true\n", "--nbd-listen"),
        ("[serve]\nnbd-listen = '0.0.0.0:10809'\n", "other hosts"),
        ("[serve]\ntls = 'required'\n", "--nbd-listen"),
        ("[serve]\nlog = 'a=b=c'\n", "log filter"),
        ("[serve]\nsocket-group = 'no such group'\n", "no group"),
    ] {
        let file = settings(&bench, settings_text);
        let told = bench.refused(&["config", "check", &file]);
        assert!(
            told.contains(words) && told.contains("hearth.toml"),
            "{told}"
        );
    }
    let told = bench.refused(&["config", "check", &bench.path("nowhere")]);
    assert!(told.contains("there is no file"), "{told}");
}
