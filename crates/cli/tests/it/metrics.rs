//! What Prometheus is given, by the command and over TCP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use crate::common::{Bench, until};

/// The value of a series.
fn value(page: &str, series: &str) -> f64 {
    let line = page.lines().find_map(|l| l.strip_prefix(series));
    let line = line.unwrap_or_else(|| panic!("{series} is not in\n{page}"));
    line.trim().parse().unwrap()
}

#[test]
fn what_a_disk_did_is_in_the_page() {
    let bench = Bench::serving();
    let origin = bench.origin("o.img", 1 << 20, 1);
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    let mut client = bench.connect("vm").unwrap();
    client.write(0, &[7; 8192]);
    client.read(0, 8192);
    let page = bench.ok(&["metrics"]);
    let disk = |name: &str, more: &str| value(&page, &format!("{name}{{disk=\"vm\"{more}}}"));
    assert_eq!(disk("hearth_disk_up", ""), 1.0);
    assert_eq!(disk("hearth_disk_written_bytes_total", ""), 8192.0);
    let hit = disk("hearth_disk_requests_total", ",op=\"read\",result=\"hit\"");
    assert_eq!(hit, 1.0);
    let all = ",op=\"read\",result=\"hit\",le=\"+Inf\"";
    assert_eq!(
        disk("hearth_disk_request_duration_seconds_bucket", all),
        1.0
    );
    assert!(value(&page, "hearth_pool_capacity_bytes") > 0.0);
    let health = |page: &str| value(page, "hearth_health{kind=\"disk\",name=\"vm\"}");
    assert_eq!(health(&page), 0.0);
    let all = page.lines().filter(|l| l.contains("\"vm\"")).count();
    assert!(all <= 60, "a disk has {all} series");
}

#[test]
fn a_disk_that_is_not_served_has_failed() {
    let mut bench = Bench::serving();
    let origin = bench.origin("o.img", 1 << 20, 1);
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    bench.stop();
    std::fs::remove_file(&origin).unwrap();
    bench.start();
    let page = until("the disk has failed", || {
        let page = bench.ok(&["metrics"]);
        let failed = "hearth_health{kind=\"disk\",name=\"vm\"} 4";
        page.contains(failed).then_some(page)
    });
    assert_eq!(value(&page, "hearth_disk_up{disk=\"vm\"}"), 0.0);
}

#[test]
fn a_scrape_over_tcp() {
    let mut bench = Bench::serving();
    let refused = bench.refused(&["metrics", "--listen", "0.0.0.0:0"]);
    assert!(refused.contains("--allow-remote"), "{refused}");
    let mut answering = bench
        .command(&["metrics", "--listen", "127.0.0.1:0"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(answering.stderr.take().unwrap())
        .read_line(&mut said)
        .unwrap();
    let at = said.trim().strip_prefix("answering at http://").unwrap();
    let at = at.strip_suffix("/metrics").unwrap().to_owned();
    let ask = |request: &str| {
        let mut stream = TcpStream::connect(&at).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let plain = ask("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let rebound = ask("GET /metrics HTTP/1.1\r\nHost: rebound.example.org\r\n\r\n");
    assert!(
        rebound.starts_with("HTTP/1.1 421") && !rebound.contains("hearth_"),
        "{rebound}"
    );
    assert!(
        plain.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"),
        "{plain}"
    );
    let open = ask(
        "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:1\r\nAccept: application/openmetrics-text;version=1.0.0\r\n\r\n",
    );
    assert!(
        open.contains("\r\nContent-Type: application/openmetrics-text; version=1.0.0")
            && open.ends_with("# EOF\n"),
        "{open}"
    );
    assert!(ask("GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
    // It outlives the daemon, and says so.
    bench.stop();
    let gone = ask("GET /metrics HTTP/1.1\r\n\r\n");
    assert!(
        gone.starts_with("HTTP/1.1 503") && gone.contains("no hearth daemon"),
        "{gone}"
    );
    answering.kill().unwrap();
    answering.wait().unwrap();
}
