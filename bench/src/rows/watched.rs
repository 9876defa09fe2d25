//! What it costs a disk that it is watched.
//!
//! History, alerts, events, metrics and the console look at the daemon from other processes, but what they ask for it has
//! to answer: that time could be taken from its disks. So the same warm reads run with all of them on and
//! with none, in turn, on one daemon; and twice with none, since only what is more than the machine's own noise is a cost.

use super::reads::warm_pool;
use crate::args::Args;
use crate::fixture;
use crate::load::{Job, run};
use crate::report::{Comparison, Outcome, Series, Spread, Wanted};
use anyhow::{Context, Result, ensure};
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use hearth_rig::monitor::Monitor;
use hearth_rig::process::cpu_us;
use hearth_rig::wait;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Names of what is measured.
const ALONE: &str = "alone";
const AGAIN: &str = "alone, again";
const WATCHED: &str = "watched";
/// Seconds of a run, at least: what asks least often does so several times in them.
const SECONDS_MIN: u64 = 15;
/// A scrape, as often as Prometheus is ever told to.
const SCRAPE_EVERY: u64 = 5;
/// What a page of the console asks for, and every how many seconds.
const PAGE: [(&str, u64); 5] = [
    ("/v1/stats", 2),
    ("/v1/disks", 2),
    ("/v1/pool", 5),
    ("/v1/health", 5),
    ("/v1/events?limit=200", 3),
];
/// Longest that the second service may take to come up, and an answer to come.
const LIMIT: Duration = Duration::from_secs(120);

pub fn reads(args: &Args) -> Result<Outcome> {
    if args.peers_only {
        return Ok(Outcome::default());
    }
    let origin = fixture::file(&args.dir, "origin.img", args.disk)?;
    let hearth = warm_pool(args, &origin)?;
    let contender = fixture::contender(&hearth, "warm", "hearth")?;
    let seconds = if args.smoke {
        2
    } else {
        args.seconds.max(SECONDS_MIN)
    };
    let mut outcome = Outcome::default();
    let names = [ALONE, WATCHED, AGAIN];
    outcome.series = (names.iter())
        .map(|name| Series {
            name: (*name).to_owned(),
            samples: Vec::new(),
        })
        .collect();
    let (mut share, mut asked) = (Vec::new(), 0);
    for round in 0..args.rounds {
        // Who is first changes: what a machine does over minutes is nobody's.
        for turn in 0..names.len() {
            let at = (round + turn) % names.len();
            let job = Job {
                seed: round as u64 + 1,
                ..Job::random("randread", 24, seconds, args.disk)
            };
            let watch = (names[at] == WATCHED)
                .then(|| Watch::start(args, &hearth))
                .transpose()?;
            let sample = run(&job, &contender)?;
            if let Some(watch) = watch {
                let (part, answers) = watch.end()?;
                share.push(part * 100.0);
                asked += answers;
            }
            eprintln!(
                "   round {}: {:14} {:9.0} requests/s",
                round + 1,
                names[at],
                sample.iops
            );
            outcome.series[at].samples.push(sample);
        }
    }
    outcome.compare_iops(AGAIN, ALONE, Wanted::Shown);
    outcome.compare_cpu(AGAIN, ALONE, Wanted::Shown);
    let noise = outcome.comparisons.first();
    let noise = noise.map_or(f64::NAN, |c| Spread::of(&c.values).min);
    outcome.compare_iops(WATCHED, ALONE, Wanted::AtLeast(noise));
    outcome.compare_cpu(WATCHED, ALONE, Wanted::AtMost(1.02));
    outcome.comparisons.push(Comparison {
        what: "the second service's CPU, of one core".to_owned(),
        values: share,
        unit: "%".to_owned(),
        wanted: Wanted::Shown,
    });
    outcome.notes.push(format!(
        "Watched: the second service with history, alerts, events and console; a scrape every {SCRAPE_EVERY} s, and an overview of the console open ({asked} answers in all). \
         Requests per second are to be no fewer than the worst of what the daemon alone gave against itself."
    ));
    Ok(outcome)
}

/// Everything that looks at a daemon. What is left of it is killed when dropped.
struct Watch {
    monitor: Monitor,
    began: Instant,
    cpu: f64,
    answers: Arc<AtomicU64>,
    /// Dropped, it ends the thread.
    stop: Sender<()>,
    asker: JoinHandle<Result<()>>,
}

impl Watch {
    /// Starts it, and waits until each part of it has looked once.
    fn start(args: &Args, hearth: &Hearth) -> Result<Watch> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let listen = format!("127.0.0.1:{port}");
        let state = hearth.dir().join("monitor");
        let state = path(&state);
        hearth.ok(&[
            "console",
            "enable",
            "--listen",
            &listen,
            "--state-dir",
            state,
        ])?;
        let config = hearth.dir().join("monitor.toml");
        // Nobody listens: what is wrong is judged and kept all the same.
        std::fs::write(&config, "[alerts.webhook]\nurl = \"http://127.0.0.1:9/\"\n")?;
        let monitor = Monitor::start_by(&args.hearth, hearth, &["--config", path(&config)])?;
        monitor.until(
            "what lies under the flash is judged",
            "/v1/health",
            |health| {
                let items = health["items"].as_array().into_iter().flatten();
                items.into_iter().any(|item| item["kind"] == "file-system")
            },
        )?;
        let page = wait::until("the console answers", LIMIT, || {
            Page::log_in(hearth, &listen, state).ok()
        })?;
        let answers = Arc::new(AtomicU64::new(0));
        let (stop, stopped) = mpsc::channel();
        let (api, count) = (hearth.api(), Arc::clone(&answers));
        let ask = move || {
            for second in 0u64.. {
                if second % SCRAPE_EVERY == 0 {
                    let text = api.text("/metrics")?;
                    ensure!(text.contains("hearth_build_info"), "no metrics: {text}");
                    count.fetch_add(1, Ordering::Relaxed);
                }
                for (path, _) in PAGE.iter().filter(|(_, every)| second % every == 0) {
                    page.get(path)?;
                    count.fetch_add(1, Ordering::Relaxed);
                }
                match stopped.recv_timeout(Duration::from_secs(1)) {
                    Err(RecvTimeoutError::Timeout) => {}
                    _ => return Ok(()),
                }
            }
            Ok(())
        };
        let asker = std::thread::Builder::new()
            .name("watch".to_owned())
            .spawn(ask)?;
        Ok(Watch {
            cpu: cpu_us(monitor.pid())?,
            began: Instant::now(),
            monitor,
            answers,
            stop,
            asker,
        })
    }

    /// Ends it; how much of a core the second service took, and how many answers were read beside it.
    fn end(self) -> Result<(f64, u64)> {
        let spent = cpu_us(self.monitor.pid())? - self.cpu;
        let share = spent / 1e6 / self.began.elapsed().as_secs_f64();
        drop(self.stop);
        let asked = self
            .asker
            .join()
            .map_err(|_| anyhow::anyhow!("what watches panicked"))?;
        asked.context("what watches found something amiss")?;
        self.monitor.end()?;
        Ok((share, self.answers.load(Ordering::Relaxed)))
    }
}

/// A session of the console.
struct Page {
    listen: String,
    cookie: String,
    token: String,
}

impl Page {
    fn log_in(hearth: &Hearth, listen: &str, state: &str) -> Result<Page> {
        let link = hearth.ok(&["console", "open", "--role", "viewer", "--state-dir", state])?;
        let (_, secret) = link.trim().rsplit_once('/').context("no link")?;
        let body = format!("{{\"link\":\"{secret}\"}}");
        let head = format!(
            "POST /console/login HTTP/1.1\r\nHost: {listen}\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let text = answer(TcpStream::connect(listen)?, &head)?;
        let (head, body) = text.split_once("\r\n\r\n").context("no whole answer")?;
        let cookie = (head.lines())
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| name.eq_ignore_ascii_case("set-cookie"))
            .and_then(|(_, value)| value.split(';').next())
            .with_context(|| format!("no session: {text}"))?;
        let said: Value = serde_json::from_str(body)?;
        let token = said["token"].as_str();
        Ok(Page {
            listen: listen.to_owned(),
            cookie: cookie.trim().to_owned(),
            token: token
                .with_context(|| format!("no token: {text}"))?
                .to_owned(),
        })
    }

    fn get(&self, path: &str) -> Result<()> {
        let head = format!(
            "GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nCookie: {}\r\nHearth-Token: {}\r\nHearth-Passive: 1\r\n\r\n",
            self.listen, self.cookie, self.token
        );
        answer(TcpStream::connect(&self.listen)?, &head).map(drop)
    }
}

/// The whole answer, which must be a good one.
fn answer(mut stream: TcpStream, head: &str) -> Result<String> {
    stream.write_all(head.as_bytes())?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text)?;
    let text = String::from_utf8(text)?;
    ensure!(text.starts_with("HTTP/1.1 200"), "{head}: {text}");
    Ok(text)
}
