#!/usr/bin/env bash
# Alert rules and the Grafana dashboard name metrics that the daemon has; the rules fire when they
# should (skipped without promtool).
#
#   tests/daemon/monitoring.sh BIN_DIR
set -euo pipefail
. "$(dirname "$0")/../lib.sh"
bin=$1
pages=$(cd "$(dirname "$0")/../../docs/monitoring" && pwd)
start --listen "ipc://$dir/s" --listen.http 127.0.0.1:0
port=$(http_port)
page /metrics >/dev/null
sed '1,/^\r$/d' "$dir/page" >"$dir/metrics"
python3 -c "import json; json.load(open('$pages/grafana.json'))" || die "grafana.json is no JSON"
for name in $(grep -ohE 'attnd_[a-z_]+' "$pages/alerts.yml" "$pages/grafana.json" | sort -u); do
  grep -qE "^# TYPE ${name%_bucket} |^# TYPE ${name%_sum} |^# TYPE ${name%_count} " "$dir/metrics" || die "no metric $name"
done
stop
command -v promtool >/dev/null || skip "no promtool to run the rules with"
promtool check metrics <"$dir/metrics" || die "the metrics are not as promtool wants them"
promtool test rules "$pages/alerts_test.yml" || die "the rules"
echo "the rules fire when they should"
